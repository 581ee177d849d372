"""What our kernels are timed beside, each as a good engineer would write it in torch.

A rival has `name`, `graph` (whether a CUDA graph can hold it), `exact` (whether it computes the MoA layer, so that its
output is checked against the reference before it is timed), `load(feeds)` (its own copy of one set of inputs) and
`run(state)`.
"""

from .. import cases
from .dense import DenseExperts
from .grouped import GroupedExperts
from .jetmoe import HuggingFaceJetMoe
from .mha import MultiHeadAttention
from .upstream import Upstream


def rivals_of(case, attributes, dtype):
    """Makers of the rivals of a case, by name, in the order of interest.

    A maker takes a back end of SDPA and options of `torch.compile`, and ignores what it has no use for.
    """
    layer = case.layer

    def mha(name, inner, width, head=None):
        return lambda backend, _: MultiHeadAttention(name, case, inner, width, head, backend)

    makers = {
        cases.MHA: mha(cases.MHA, cases.equal_mac_width(case), layer.width),
        cases.DENSE: lambda backend, options: DenseExperts(case, attributes, options, backend),
        cases.GROUPED: lambda backend, _: GroupedExperts(case, attributes, backend),
    }
    if layer.rope:
        makers[cases.HF_SDPA] = lambda _, __: HuggingFaceJetMoe(case, attributes, dtype, "sdpa")
        makers[cases.HF_EAGER] = lambda _, __: HuggingFaceJetMoe(case, attributes, dtype, "eager")
    else:
        makers[cases.UPSTREAM] = lambda _, __: Upstream(case, attributes, losses=True)
        makers[cases.UPSTREAM_COMPILED] = lambda _, options: Upstream(case, attributes, False, options)
        makers[cases.BLOCK] = mha(cases.BLOCK, 512, 512, 64)
    return makers
