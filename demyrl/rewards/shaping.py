"""What is added to the outcome: the penalty for long responses and the bonus for tool use."""

from typing import Literal, get_args

ToolBonus = Literal["off", "intended", "paper", "shipped"]
TOOL_BONUSES: tuple[str, ...] = get_args(ToolBonus)

PER_CALL = 0.1
MOST = 0.4  # a wrong answer never scores above -0.6, however many calls it made


def overlong(length: int, max_len: int, cache_len: int) -> float:
    """The length penalty: 0 up to max_len - cache_len, then falling evenly to -1 at max_len.

    Lengths are in tokens; beyond max_len it stays -1 (the paper, section 2.3). Raises ValueError
    unless 0 < cache_len <= max_len.
    """
    check_lengths(max_len, cache_len)
    over = length - (max_len - cache_len)
    return -min(max(over / cache_len, 0.0), 1.0) if over > 0 else 0.0


def check_lengths(max_len: int, cache_len: int) -> None:
    """Raises ValueError unless 0 < cache_len <= max_len."""
    if not 0 < cache_len <= max_len:
        raise ValueError(
            f"cache_len is {cache_len} and max_len is {max_len}: the penalty grows over the last "
            "cache_len tokens, so it must be at least 1 and at most max_len, or even an empty "
            "response would be punished."
        )


def tool_bonus(option: ToolBonus, correct: bool, calls: int) -> float:
    """What `calls` executed tool calls add to an outcome of 1 (correct) or -1.

    intended  what the reference code means to do: wrong answers gain 0.1 a call, up to 0.4
    paper     equation 8: right answers gain 0.1 a call as well, without limit; the bound that the
              printed minimum lacks is taken from the code
    shipped   what the reference code does: it never sees the calls and takes 0.1 from every wrong
              answer
    """
    if option == "off":
        return 0.0
    if option == "shipped":
        return 0.0 if correct else -PER_CALL
    if option == "paper" and correct:
        return PER_CALL * calls
    if option in ("intended", "paper"):
        return 0.0 if correct else min(MOST, PER_CALL * calls)
    raise ValueError(f"tool_bonus is {option!r}: choose from {', '.join(TOOL_BONUSES)}.")
