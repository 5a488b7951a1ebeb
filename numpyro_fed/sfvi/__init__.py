"""SFVI and SFVI-Avg."""
