"""The operators as MoLM asks for them, on ONNX Runtime: stick-breaking, routers with an input, hidden states as keys."""

import unittest

import numpy as np

from test_operator_library import OperatorCase, compute, feed_case, floats, self_case


def molm_case(seed, past=0, rope=False, own_keys=False, router=True, sizes=None):
    """Stick-breaking; keys and values are the hidden states but where a layer has its `own_keys`."""
    sizes = sizes or (3, 6, 16, 5, 2, 2, 8)
    case = self_case(seed, causal=1, past=past, rope=rope, skip=0, sizes=sizes)
    operator, attributes, feeds = case
    attributes["attention_mode"] = "stick_breaking"
    random = np.random.default_rng(seed)
    if not own_keys:
        del feeds["kv_weight"]
    if router:
        b, t, _, e, *_ = sizes
        feeds |= {"router_input": floats(random, b, t, 9), "router_weight": floats(random, 9, e, amplitude=2.0)}
    return operator, attributes, feeds


class StickBreaking(OperatorCase):
    def test_stick_breaking(self):
        for seed, past in enumerate((0, 4)):
            for own_keys in (False, True):
                for router in (False, True):
                    for rope in (False, True):
                        with self.subTest(past=past, own_keys=own_keys, router=router, rope=rope):
                            self.check(*molm_case(seed, past, rope, own_keys, router))
        self.check(*molm_case(5, past=40, sizes=(2, 300, 64, 5, 2, 1, 64)))
        self.check(*molm_case(6, past=300, sizes=(3, 1, 64, 5, 2, 1, 64)))

    def test_steps_of_stick_breaking_agree_with_one_pass(self):
        operator, attributes, feeds = molm_case(3, sizes=(1, 5, 16, 5, 2, 1, 16))
        feeds["attention_mask"][:] = 1
        whole = compute(operator, attributes, feeds)["output"]
        past = {}
        for t in range(5):
            step = {**feeds, **past, **{name: feeds[name][:, t : t + 1] for name in ("hidden_states", "router_input")}}
            step["attention_mask"] = np.ones((1, t + 1), np.int32)
            found = compute(operator, attributes, step)
            np.testing.assert_allclose(found["output"][:, 0], whole[:, t], rtol=1e-5, atol=1e-5)
            past = {"past_key": found["present_key"], "past_value": found["present_value"]}

    def test_a_feed_forward_block_may_route_by_an_input(self):
        operator, attributes, feeds = feed_case(9, activation="gelu_tanh")
        random = np.random.default_rng(9)
        feeds |= {"router_input": floats(random, 2, 7, 5), "router_weight": floats(random, 5, 6, amplitude=2.0)}
        self.check(operator, attributes, feeds)
        feeds["router_input"] = feeds["router_input"][:, :6]
        self.refused(operator, attributes, feeds, "the_node", "input `router_input` must be [B, T, R]")

    def test_stick_breaking_needs_an_order_of_keys(self):
        operator, attributes, feeds = molm_case(1)
        self.refused(operator, {**attributes, "causal": 0}, feeds, "the_node", "stick_breaking, which needs `causal` = 1")


if __name__ == "__main__":
    unittest.main()
