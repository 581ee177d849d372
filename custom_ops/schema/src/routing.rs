//! Names of the values that hold the routing of a module.

use crate::parameter;

/// What a value says of each token's `k` experts, `[B, T, k]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoutingPart {
    /// Which ones, int64.
    Indices,
    /// With what weights, float32.
    Weights,
}

/// How a name of routing begins.
const ROUTER: &str = "router.";

impl RoutingPart {
    /// Every part, in the order in which the operators return them.
    pub const ALL: [Self; 2] = [Self::Indices, Self::Weights];

    /// Last part of the name of a value in a graph.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Indices => "indices",
            Self::Weights => "weights",
        }
    }

    /// The output of an operator that it is.
    pub const fn output(self) -> &'static str {
        match self {
            Self::Indices => parameter::TOPK_INDICES,
            Self::Weights => parameter::TOPK_WEIGHTS,
        }
    }

    /// The part that the output `name` of an operator is, if it is one.
    pub fn of_output(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.output() == name)
    }

    /// Name of the part for `module`, which is empty where a layer is the whole model: `router.{module}.{part}`.
    pub fn name(self, module: &str) -> String {
        let gap = if module.is_empty() { "" } else { "." };
        format!("{ROUTER}{module}{gap}{}", self.as_str())
    }

    /// The module that the value `name` holds this part for, if it does.
    pub fn module(self, name: &str) -> Option<&str> {
        let module = name.strip_prefix(ROUTER)?.strip_suffix(self.as_str())?;
        if module.is_empty() { Some(module) } else { module.strip_suffix('.') }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_parts_and_modules() {
        for (module, part, name) in [
            ("", RoutingPart::Indices, "router.indices"),
            ("layers.0", RoutingPart::Indices, "router.layers.0.indices"),
            ("layers.0", RoutingPart::Weights, "router.layers.0.weights"),
        ] {
            assert_eq!((part.name(module).as_str(), part.module(name)), (name, Some(module)));
        }
        for name in ["router.layers.0.weights", "router.myindices", "layers.0.indices", "router.", ""] {
            assert_eq!(RoutingPart::Indices.module(name), None, "{name}");
        }
    }

    #[test]
    fn every_operator_returns_its_routing_last() {
        for operator in crate::OPERATORS {
            let parts = operator.outputs.iter().rev().take(2).map(|output| RoutingPart::of_output(output.name));
            let routed = parts.eq([Some(RoutingPart::Weights), Some(RoutingPart::Indices)]);
            assert_eq!(routed, operator.is_routed(), "{}", operator.name);
        }
        assert_eq!(RoutingPart::of_output("output"), None);
    }
}
