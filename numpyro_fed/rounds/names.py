"""The names of all exchanges, by which silos are asked and a silo's policy allows questions.

They stand on the wire and in policies' files: all parties must be of one version. Questions that
are no exchanges of a method (to begin, to describe data) have theirs in ``rounds/messages.py``.
"""

# The search for the mode, and what follows from it.
MODE = "mode"  # derivatives of the log likelihood at one place or several
OWN_MODES = "own modes"  # each silo climbs to a mode of its own
AROUND_MODE = "around the mode"  # log likelihoods at places around it, to check the curvature
FROM_MODE = "from the mode"  # silos' states begin at the mode

# The rounds of methods.
SFVI_STEP = "sfvi"
SFVI_AVG_ROUND = "sfvi_avg"
ROWS = "rows"  # the number of rows over all silos, by which SFVI-Avg weighs them
MEANS, DEVIATIONS = "means", "deviations"  # of the inputs of encoders
PVI_ROUND = "pvi"
EVALUATION = "evaluation"  # silos' expected log likelihoods, for PVI's free energy
PRIVATE_UNITS = "private units"
PRIVATE_SIZES = "private sizes"
PRIVATE_SUMS = "private sums"  # followed by the number of the step

# The rounds of columns.
DRAW, LIKELIHOOD, STEP = "draw", "likelihood", "step"
SHOW = "show"  # clients send auxiliary variables
TRY, TURN, SPREAD = "try", "turn", "spread"  # of the search for the mode
BEGIN_AT_MODE, BEGIN_AT_ZERO = "begin at the mode", "begin at zero"
SAMPLE = "sample"  # all parties draw from their parts of the posterior

# Questions to a result.
IMPORTANCE = "importance"  # log likelihoods at draws, for an importance correction
TEMPERED = "tempered"  # log likelihoods and their gradients at particles
LEAVE_OUT = "leave out"
LOO = "loo"
AVERAGE = "average"  # sums of a site over rows at draws
CALIBRATION = "calibration"  # outcomes, counted by their predicted probability
INFLUENCE = "influence"  # how far each silo moves the posterior
OUTER_LATENTS = "outer latents"  # silos tell the latents that rows share
