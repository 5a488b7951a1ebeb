"""Models by formulas of lme4's and brms' grammar, as ordinary texts."""
