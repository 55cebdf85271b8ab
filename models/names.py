"""Rows of tensor names: which arrays of ours a tensor of a Hugging Face folder holds, and how."""

from typing import Literal, NamedTuple

# How a tensor holds arrays; `moezoo.hub.tensors` describes `plain`.
#
# row: an array [n] as [1, n].
# inner: an array [n] as [1, 1, n, 1].
# of_experts: those of all experts, [experts, outputs, inputs], where others have a tensor for each.
# transposed: the same as [experts, inputs, outputs].
# alternating: those of all experts with our dimensions, [experts, inputs, outputs]. Arrays that are joined alternate
#     along the last dimension: gate 0, up 0, gate 1, up 1, and so on.
# flat: weights [inputs, *outputs] as [outputs, inputs]. All outputs of one array come before those of the next; in a
#     row with `groups`, those of one group of all arrays before those of the next group.
# filters: the same of convolutions [taps, *channels], as [channels, 1, taps].
Layout = Literal["plain", "row", "inner", "flat", "filters", "of_experts", "transposed", "alternating"]


class Row(NamedTuple):
    """The arrays at the paths `ours` are the tensor `name`, joined along their last dimension if no layout differs.

    In a row with `{layer}`, and perhaps `{expert}`, in its name paths start at the block, in others at the model. A row
    whose arrays a model does not have counts for nothing. In one without `{expert}` for arrays of experts the tensor is
    that of one expert, which all others are copies of.

    Attributes:
        ours: The paths.
        name: The name.
        layout: How the tensor holds the arrays.
        beside: A path. The row counts only where there is an array, for blocks in which others have the paths `ours`.
        groups: For `flat`: the path of an array of which the first output dimension has an index per group.
    """

    ours: tuple[str, ...]
    name: str
    layout: Layout = "plain"
    beside: str = ""
    groups: str = ""


Rows = tuple[Row, ...]


def rows(ours: str, theirs: str, names: str, layout: Layout = "plain", *, beside: str = "", groups: str = "") -> Rows:
    """Return a row for each `path=name` in `names`, of an array below `ours` and a tensor below `theirs`.

    Paths of arrays that are joined have a `+` in between. `beside` and `groups` are paths below `ours` too.
    """
    pairs = (pair.split("=") for pair in names.split())
    below = lambda path: path and ours + path  # noqa: E731
    further = layout, below(beside), below(groups)
    return tuple(Row(tuple(map(below, paths.split("+"))), theirs + name, *further) for paths, name in pairs)


def change(common: Rows, *others: Row) -> Rows:
    """Return `common`, with `others` in place of the rows of the same arrays."""
    return tuple({(row.ours, row.beside): row for row in (*common, *others)}.values())


# What most folders have.
LAYER = "model.layers.{layer}."
ATTENTION, MLP, MOE = f"{LAYER}self_attn.", f"{LAYER}mlp.", "feed_forward."
_OUTSIDE = "embedding.weight=model.embed_tokens.weight unembedding.norm.scale=model.norm.weight"
_OUTSIDE += " unembedding.weight=lm_head.weight"
GROUPED_ATTENTION = rows(
    "attention.",
    ATTENTION,
    """
    query=q_proj.weight key=k_proj.weight value=v_proj.weight out=o_proj.weight
    query_bias=q_proj.bias key_bias=k_proj.bias value_bias=v_proj.bias out_bias=o_proj.bias
    query_norm.scale=q_norm.weight key_norm.scale=k_norm.weight sinks=sinks
    """,
)
LATENT_ATTENTION = rows(
    "attention.",
    ATTENTION,
    """
    query=q_proj.weight query_down=q_a_proj.weight query_norm.scale=q_a_layernorm.weight query_up=q_b_proj.weight
    kv_down=kv_a_proj_with_mqa.weight kv_norm.scale=kv_a_layernorm.weight key_up+value_up=kv_b_proj.weight
    out=o_proj.weight
    """,
)
SWIGLU = "gate=gate_proj.weight up=up_proj.weight down=down_proj.weight"
FEED_FORWARD = (
    *rows(MOE, MLP, SWIGLU),
    *rows(f"{MOE}router.", f"{MLP}gate.", "weight=weight choice_bias=e_score_correction_bias"),
    *rows(f"{MOE}experts.", f"{MLP}experts.{{expert}}.", SWIGLU),
    *rows(f"{MOE}shared.", f"{MLP}shared_experts.", SWIGLU),
)
# The same, with a shared MLP that a gate of one number per token multiplies.
GATED_SHARED = change(
    FEED_FORWARD,
    *rows(f"{MOE}shared.", f"{MLP}shared_expert.", SWIGLU),
    *rows(f"{MOE}shared.", MLP, "token_gate=shared_expert_gate.weight"),
)


def layers(
    attention: Rows = GROUPED_ATTENTION,
    feed_forward: Rows = FEED_FORWARD,
    norms: str = "feed_forward_norm.scale=post_attention_layernorm.weight",
) -> Rows:
    """Return the rows of a model whose layers have these; `norms` are those of norms behind the first."""
    before = rows("", LAYER, "attention_norm.scale=input_layernorm.weight")
    between = rows("", LAYER, norms)
    return (*rows("", "", _OUTSIDE), *before, *attention, *between, *feed_forward)


USUAL = layers()
# The names in Mixtral's folders.
SPARSE = f"{LAYER}block_sparse_moe."
SPARSE_EXPERTS = rows(f"{MOE}experts.", f"{SPARSE}experts.{{expert}}.", "gate=w1.weight up=w3.weight down=w2.weight")
BLOCK_SPARSE = change(
    USUAL,
    *rows(f"{MOE}router.", SPARSE, "weight=gate.weight choice_bias=e_score_correction_bias"),
    *SPARSE_EXPERTS,
)
# The names in folders of dense models, whose MLP is one expert.
DENSE = layers(feed_forward=rows(f"{MOE}experts.", MLP, SWIGLU))
