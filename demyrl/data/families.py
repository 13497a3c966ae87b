"""The families of generated problems: what is asked, the right program and some wrong ones.

A family is a function that draws operands. With `digits=2` nearly every number is one of 10..99, so
that a tokenizer with a token for each of them lets a very small model copy operands into its code.
Answers are hard to guess without running code: results with a small range or with frequent values
are drawn again. `slips` holds two programs that fail or print nothing, then two that print a wrong
value (in rare cases, by chance, the right one).
"""

import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable

from demyrl.types import Domain

LONG_CYCLE = 45  # residues a repeated product must pass before it returns; bounds a blind guess


@dataclasses.dataclass(frozen=True)
class ProblemConfig:
    families: tuple[str, ...]  # names of FAMILIES
    digits: int  # decimal digits of an operand
    terms: int  # operands of an arithmetic expression; an lcm has one fewer


@dataclasses.dataclass(frozen=True)
class Draft:
    """One draw of a family, before it has an id and one of its wordings."""

    key: str  # equal for two wordings of the same problem
    wordings: tuple[str, ...]
    answer: str
    program: str
    slips: tuple[str, ...]
    grader: str = "number"


def operand(rng: random.Random, digits: int) -> int:
    """A number with exactly so many digits."""
    return rng.randrange(10 ** (digits - 1), 10**digits)


def operands(rng: random.Random, digits: int, count: int) -> list[int]:
    return [operand(rng, digits) for _ in range(count)]


def rising(rng: random.Random, digits: int) -> tuple[int, int]:
    """Two numbers at least 10 apart, the smaller first."""
    low, high = sorted(operands(rng, digits, 2))
    return (low, high) if high - low >= 10 else rising(rng, digits)


def cycles_late(start: int, factor: int, modulus: int) -> bool:
    """Whether start, start*factor, start*factor**2, ... takes many values modulo `modulus`."""
    seen = set()
    value = start % modulus
    for _ in range(LONG_CYCLE):
        if value in seen:
            return False
        seen.add(value)
        value = value * factor % modulus
    return True


# --- math -------------------------------------------------------------------------------------


def arithmetic(rng: random.Random, config: ProblemConfig) -> Draft:
    """Sums and differences of products of two; an odd last operand stands alone."""
    numbers = operands(rng, config.digits, config.terms)
    parts = ["*".join(map(str, numbers[i : i + 2])) for i in range(0, len(numbers), 2)]
    signs = [rng.choice("+-") for _ in parts[1:]]
    expression = parts[0] + "".join(s + p for s, p in zip(signs, parts[1:], strict=True))
    value = math.prod(numbers[:2])
    for i, sign in enumerate(signs, 1):
        value += math.prod(numbers[2 * i : 2 * i + 2]) * (1 if sign == "+" else -1)
    return Draft(
        key=expression,
        wordings=(f"What is {expression}?", f"Compute {expression}.", f"Work out {expression}."),
        answer=str(value),
        program=f"print({expression})",
        slips=(
            f"x={expression}",
            f"print({expression}",
            f"print({expression.translate(str.maketrans('+-', '-+'))})",
            f"print({expression.replace('*', '+', 1)})",
        ),
    )


def power_mod(rng: random.Random, config: ProblemConfig) -> Draft:
    """A power modulo a number in which the base has a long cycle."""
    a, b, c = operands(rng, config.digits, 3)
    if not cycles_late(1, a, c):
        return power_mod(rng, config)
    return Draft(
        key=f"{a},{b},{c}",
        wordings=(
            f"What is {a} to the power {b} modulo {c}?",
            f"Find the remainder of {a} to the power {b} divided by {c}.",
        ),
        answer=str(pow(a, b, c)),
        program=f"print({a}**{b}%{c})",
        slips=(
            f"x={a}**{b}%{c}",
            f"print(power({a},{b})%{c})",
            f"print({a}^{b}%{c})",
            f"print({a}*{b}%{c})",
        ),
    )


def digit_sum(rng: random.Random, config: ProblemConfig) -> Draft:
    """The sum of the decimal digits of a power: a wide range, unlike that of a short product."""
    a, b = operand(rng, config.digits), operand(rng, 2)
    if a % 10 == 0:  # mostly zeros: the sum would be small
        return digit_sum(rng, config)
    return Draft(
        key=f"{a},{b}",
        wordings=(
            f"What is the digit sum of {a} to the power {b}?",
            f"Add up the digits of {a} to the power {b}.",
        ),
        answer=str(sum(map(int, str(a**b)))),
        program=f"print(sum(map(int,str({a}**{b}))))",
        slips=(
            f"x=sum(map(int,str({a}**{b})))",
            f"print(sum({a}**{b}))",
            f"print(sum(map(int,str({a}^{b}))))",
            f"print(len(str({a}**{b})))",
        ),
    )


def lcm(rng: random.Random, config: ProblemConfig) -> Draft:
    """The least common multiple of numbers, none of which is one by itself."""
    numbers = operands(rng, config.digits, config.terms - 1)
    value = math.lcm(*numbers)
    if value in numbers:
        return lcm(rng, config)
    joined = ",".join(map(str, numbers))
    spoken = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return Draft(
        key=",".join(map(str, sorted(numbers))),
        wordings=(
            f"What is the least common multiple of {spoken}?",
            f"Find the lcm of {spoken}.",
        ),
        answer=str(value),
        program=f"import math;print(math.lcm({joined}))",
        slips=(
            f"print(math.lcm({joined}))",
            f"import math;x=math.lcm({joined})",
            f"import math;print(math.gcd({joined}))",
            f"print({joined.replace(',', '*')}//2)",
        ),
    )


def linear_equation(rng: random.Random, config: ProblemConfig) -> Draft:
    """x divided by a, plus or minus b, is c; solved for x, which is an integer."""
    a, b, c = operands(rng, config.digits, 3)
    sign, inverse = rng.choice(["+-", "-+"])
    if b == c:
        return linear_equation(rng, config)
    equation = f"x/{a}{sign}{b}={c}"
    return Draft(
        key=equation,
        wordings=(f"Solve {equation} for x.", f"Find x such that {equation}."),
        answer=str((c + b if sign == "-" else c - b) * a),
        program=f"print(({c}{inverse}{b})*{a})",
        slips=(
            f"x=({c}{inverse}{b})*{a}",
            f"print(solve({equation}))",
            f"print(({c}{sign}{b})*{a})",
            f"print({c}{inverse}{b}*{a})",
        ),
    )


# --- science ----------------------------------------------------------------------------------


def seconds(rng: random.Random, config: ProblemConfig) -> Draft:
    """Hours, minutes and seconds as seconds."""
    h, m, s = operand(rng, config.digits), rng.randrange(10, 60), rng.randrange(10, 60)
    return Draft(
        key=f"{h},{m},{s}",
        wordings=(
            f"How many seconds are {h} h {m} min {s} s?",
            f"Convert {h} h {m} min {s} s to seconds.",
        ),
        answer=str(h * 3600 + m * 60 + s),
        program=f"print({h}*3600+{m}*60+{s})",
        slips=(
            f"x={h}*3600+{m}*60+{s}",
            f"print({h}h+{m}*60+{s})",
            f"print({h}*60+{m}*60+{s})",
            f"print({h}*3600+{m}*60)",
        ),
    )


def kinetic_energy(rng: random.Random, config: ProblemConfig) -> Draft:
    """Half of mass times speed squared, in joule."""
    m, v = operands(rng, config.digits, 2)
    twice = m * v**2
    return Draft(
        key=f"{m},{v}",
        wordings=(
            f"A {m} kg cart moves at {v} m/s. Find its kinetic energy in J.",
            f"What is the kinetic energy in J of {m} kg at {v} m/s?",
        ),
        answer=f"{twice // 2}.5" if twice % 2 else str(twice // 2),
        program=f"print({m}*{v}**2/2)",
        slips=(
            f"x={m}*{v}**2/2",
            f"print({m}*{v}^2/2)",
            f"print({m}*{v}**2)",
            f"print({m}*{v}/2)",
        ),
    )


def electric_power(rng: random.Random, config: ProblemConfig) -> Draft:
    """Current squared times resistance, in watt."""
    current, ohm = operands(rng, config.digits, 2)
    if current == ohm:
        return electric_power(rng, config)
    return Draft(
        key=f"{current},{ohm}",
        wordings=(
            f"A current of {current} A flows through {ohm} ohm. Find the power in W.",
            f"What power in W do {current} A make in {ohm} ohm?",
        ),
        answer=str(current**2 * ohm),
        program=f"print({current}**2*{ohm})",
        slips=(
            f"x={current}**2*{ohm}",
            f"print(current**2*{ohm})",
            f"print({current}^2*{ohm})",
            f"print({ohm}**2*{current})",
        ),
    )


def momentum(rng: random.Random, config: ProblemConfig) -> Draft:
    """Mass times the change of speed, in newton second."""
    m = operand(rng, config.digits)
    u, v = rising(rng, config.digits)
    return Draft(
        key=f"{m},{u},{v}",
        wordings=(
            f"A {m} kg ball goes from {u} m/s to {v} m/s. Find its change of momentum.",
            f"What impulse takes {m} kg from {u} m/s to {v} m/s?",
        ),
        answer=str(m * (v - u)),
        program=f"print({m}*({v}-{u}))",
        slips=(
            f"x={m}*({v}-{u})",
            f"print({m}*({v}-{u})",
            f"print({m}*({u}-{v}))",
            f"print({m}*{v}-{u})",
        ),
    )


# --- code -------------------------------------------------------------------------------------

PROGRAM_WORDINGS = ("What does this program print?\n{}", "Give the output of this code:\n{}")


def loop_output(rng: random.Random, config: ProblemConfig) -> Draft:
    """What a loop prints: a power modulo a number, a weighted sum, or mixed bits."""
    x, a, c = operands(rng, config.digits, 3)
    low, high = rising(rng, config.digits)
    shape = rng.choice(("power", "sum", "bits"))
    if shape == "power":
        if not cycles_late(x, a, c):
            return loop_output(rng, config)
        head, body, value = f"range({low})", f"x=x*{a}%{c}", x * pow(a, low, c) % c
    elif shape == "sum":
        head, body = f"range({low},{high})", f"x=x+i*{a}"
        value = x + a * sum(range(low, high))
    else:
        head, body = f"range({low},{high})", f"x=x^i*{a}"
        value = functools.reduce(lambda bits, i: bits ^ i * a, range(low, high), x)
    lines = (f"x={x}", f"for i in {head}:{body}", "print(x)")
    program = "\n".join(lines)
    return Draft(
        key=program,
        wordings=tuple(wording.format(program) for wording in PROGRAM_WORDINGS),
        answer=str(value),
        program=program,
        slips=(
            "\n".join(lines[:2]),
            "\n".join(lines[1:]),
            program.replace("*", "+", 1),
            program.replace(f"x={x}", "x=0", 1),
        ),
    )


def list_output(rng: random.Random, config: ProblemConfig) -> Draft:
    """What a line with a sum over a range prints."""
    low, high = rising(rng, config.digits)
    a = operand(rng, config.digits)
    steps = range(low, high)
    term, value = rng.choice(
        (
            (f"x*x+{a}", sum(x * x + a for x in steps)),
            (f"x*{a}", sum(x * a for x in steps)),
            (f"x*(x-{a})", sum(x * (x - a) for x in steps)),
        )
    )
    program = f"print(sum({term} for x in range({low},{high})))"
    return Draft(
        key=program,
        wordings=tuple(wording.format(program) for wording in PROGRAM_WORDINGS),
        answer=str(value),
        program=program,
        slips=(
            program.replace("print(", "x=", 1).removesuffix(")"),
            program.removesuffix(")"),
            program.replace("sum", "max", 1),
            program.replace("*", "+", 1),
        ),
    )


def linear_expression(rng: random.Random, config: ProblemConfig) -> Draft:
    """A linear expression in x through two points; more points of the line stay hidden."""
    u, v = sorted(operands(rng, config.digits, 2))
    y, z = operands(rng, config.digits, 2)
    if u == v or (z - y) % (v - u) or abs(z - y) < 2 * (v - u):
        return linear_expression(rng, config)
    slope = (z - y) // (v - u)
    tests = [[x, y + slope * (x - u)] for x in (u, v, 0, u + v)]
    program = f"a=({z}-{y})//({v}-{u});print(a,'*x+',{y}-a*{u})"
    return Draft(
        key=f"{u},{y},{v},{z}",
        wordings=(
            f"Give a linear f(x) with f({u})=={y} and f({v})=={z}.",
            f"Write a line in x that makes f({u})=={y} and f({v})=={z} true.",
        ),
        answer=json.dumps(tests, separators=(",", ":")),
        program=program,
        slips=(
            program.replace("a=", "", 1),
            program.replace(";print(", ";b=(", 1),
            program.replace(f"{y}-a*{u}", f"{y}-{u}", 1),
            program.replace(f"({v}-{u})", f"({u}-{v})", 1),
        ),
        grader="expression",
    )


FAMILIES: dict[str, tuple[Domain, Callable[[random.Random, ProblemConfig], Draft]]] = {
    "arithmetic": ("math", arithmetic),
    "power_mod": ("math", power_mod),
    "digit_sum": ("math", digit_sum),
    "lcm": ("math", lcm),
    "linear_equation": ("math", linear_equation),
    "seconds": ("science", seconds),
    "kinetic_energy": ("science", kinetic_energy),
    "electric_power": ("science", electric_power),
    "momentum": ("science", momentum),
    "loop_output": ("code", loop_output),
    "list_output": ("code", list_output),
    "linear_expression": ("code", linear_expression),
}
