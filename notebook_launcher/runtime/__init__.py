"""What a training function imports: ``Accelerator`` and its parts.

Below it: ``strategies/`` say how a model is spread over the processes, ``backends/`` what the hardware can do. Imports
core and torch, and never asks who launched the process: its place in the run comes from ``core.config.world()``.
"""
