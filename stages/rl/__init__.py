"""Reinforcement learning from rewards: the parts that the stage ``ppo`` is put together from."""
