"""The frozen target: reading its configuration, loading its weights, tapping its layers.

Nothing is imported here, so that `engine.target.taps` and `engine.target.configuration` stay free
of torch for the commands that only check a schedule.
"""
