"""Models whose columns lie with several clients."""
