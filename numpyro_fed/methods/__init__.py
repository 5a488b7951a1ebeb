"""The front door: methods with their settings, ``run`` and ``load``; may import everything."""
