"""The version of this package, which all parties must have alike."""

VERSION = "0.1.0"
