"""Renamed keys. An old key is refused with its new name, on the command line and in saved configurations."""

# The version that wrote the old keys. It can read and continue runs that have them.
BEFORE = "0.1"
RENAMED = {
    "model.score": "model.router.score",
    "model.groups": "model.router.groups",
    "model.kept_groups": "model.router.kept_groups",
    "model.group_score": "model.router.group_score",
    "model.expert_weights": "model.router.gates",
    "model.expert_scale": "model.router.scale",
    "model.choice_bias": "model.router.choice_bias",
    "model.bias_rate": "model.router.bias_rate",
    "model.yarn_factor": "model.yarn.factor",
    "model.yarn_length": "model.yarn.length",
    "model.yarn_beta_fast": "model.yarn.beta_fast",
    "model.yarn_beta_slow": "model.yarn.beta_slow",
    "model.yarn_mscale": "model.yarn.mscale",
    "model.yarn_mscale_all": "model.yarn.mscale_all",
}
