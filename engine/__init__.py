"""DFlash engine: trains speculative-decoding drafters against a frozen target, in one process.

Importing this package loads no GPU library; the parts that need torch import it themselves.
"""

__version__ = "0.1.0"
