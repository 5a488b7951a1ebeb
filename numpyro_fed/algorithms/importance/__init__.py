"""The importance correction: proposals, a silo's likelihood estimate, one exchange."""
