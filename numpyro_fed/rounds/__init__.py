"""Exchanges between a server and silos, schedules, loops over rounds, progress."""
