"""What a run returns: posterior, report, importance correction, saving.

May import everything but ``methods`` and ``reference``.
"""
