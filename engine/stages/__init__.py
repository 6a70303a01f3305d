"""The five stages, one file each: where lanes meet the training. Each is called as a graph's work.

A stage reads as straight PyTorch: its lane has made device and stream current.
"""
