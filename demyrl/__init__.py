"""demyrl: agentic reinforcement learning in JAX. Start reading at `demyrl/train.py`."""
