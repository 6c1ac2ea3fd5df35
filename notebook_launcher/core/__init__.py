"""What every process of a run shares: options, errors, events, channels, registries.

Imports the standard library, pydantic, PyYAML and cloudpickle, never torch: the kernel loads this room.
"""
