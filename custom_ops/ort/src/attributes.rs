//! Attributes of a node, read once when its kernel is created.

use moa_schema::{
    Activation, CROSS_ATTENTION, CrossAttentionAttributes, DOMAIN, FEED_FORWARD, FeedForwardAttributes, GateMode,
    OPSET_VERSION, Operator, PLUGIN_VERSION, PRESENT_INPUTS, SELF_ATTENTION, SelfAttentionAttributes,
};

use crate::failure::Failure;

/// Where attributes come from; `None` where the node has none of that name and type.
pub(crate) trait AttributeSource {
    fn int(&self, name: &str) -> Option<i64>;
    fn float(&self, name: &str) -> Option<f32>;
    fn string(&self, name: &str) -> Option<String>;
}

/// The attributes of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Attributes {
    SelfAttention(SelfAttentionAttributes),
    CrossAttention(CrossAttentionAttributes),
    FeedForward(FeedForwardAttributes),
}

impl Attributes {
    /// Reads what `operator` declares.
    pub(crate) fn read(operator: &Operator, source: &dyn AttributeSource) -> Result<Self, Failure> {
        let reader = Reader { source };
        match operator.name {
            name if name == SELF_ATTENTION.name => Ok(Self::SelfAttention(SelfAttentionAttributes {
                top_k: reader.count("top_k")?,
                kv_num_heads: reader.count("kv_num_heads")?,
                causal: reader.flag("causal")?,
                scale: reader.finite("scale")?,
                gate_mode: reader.gate_mode()?,
                skip_padded_queries: reader.flag("skip_padded_queries")?,
            })),
            name if name == CROSS_ATTENTION.name => Ok(Self::CrossAttention(CrossAttentionAttributes {
                top_k: reader.count("top_k")?,
                kv_num_heads: reader.count("kv_num_heads")?,
                scale: reader.finite("scale")?,
                gate_mode: reader.gate_mode()?,
                skip_padded_queries: reader.flag("skip_padded_queries")?,
            })),
            name if name == FEED_FORWARD.name => Ok(Self::FeedForward(FeedForwardAttributes {
                top_k: reader.count("top_k")?,
                gate_mode: reader.gate_mode()?,
                activation: reader.activation()?,
                gated: reader.flag("gated")?,
            })),
            name => Err(Failure::argument(format!("no kernel for operator {name}"))),
        }
    }
}

/// Refuses a node that is written for another version of the operators than this library's, where the node says so.
///
/// The runtime takes the newest operator that is not newer than what the model asks for, and does not tell which that
/// was.
pub(crate) fn check_version(source: &dyn AttributeSource) -> Result<(), Failure> {
    let version = OPSET_VERSION.to_string();
    match source.string(PLUGIN_VERSION).filter(|written| *written != version) {
        None => Ok(()),
        Some(written) => Err(Failure::argument(format!(
            "the model needs version {written} of the operators {DOMAIN}, and this libmoa_ort has version {version}: use the \
             libmoa_ort of the moa-export that wrote the model"
        ))),
    }
}

/// Refuses a node whose inputs were moved together for TensorRT, so that they do not stand where the schema has them.
pub(crate) fn check_inputs(source: &dyn AttributeSource) -> Result<(), Failure> {
    let present = source.int(PRESENT_INPUTS).unwrap_or_default();
    if present & present.wrapping_add(1) == 0 {
        return Ok(());
    }
    Err(Failure::argument(
        "the node was prepared for TensorRT, which moves its inputs: run the export that it was prepared from",
    ))
}

struct Reader<'a> {
    source: &'a dyn AttributeSource,
}

impl Reader<'_> {
    fn int(&self, name: &str) -> Result<i64, Failure> {
        self.source.int(name).ok_or_else(|| missing(name, "INT"))
    }

    fn count(&self, name: &str) -> Result<usize, Failure> {
        let value = self.int(name)?;
        match usize::try_from(value) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Failure::argument(format!("attribute `{name}` must be at least 1, found {value}"))),
        }
    }

    fn flag(&self, name: &str) -> Result<bool, Failure> {
        match self.int(name)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(Failure::argument(format!("attribute `{name}` must be 0 or 1, found {value}"))),
        }
    }

    fn finite(&self, name: &str) -> Result<f32, Failure> {
        let value = self.source.float(name).ok_or_else(|| missing(name, "FLOAT"))?;
        if value.is_finite() {
            return Ok(value);
        }
        Err(Failure::argument(format!("attribute `{name}` must be finite, found {value}")))
    }

    fn string(&self, name: &str) -> Result<String, Failure> {
        self.source.string(name).ok_or_else(|| missing(name, "STRING"))
    }

    fn gate_mode(&self) -> Result<GateMode, Failure> {
        let text = self.string("gate_mode")?;
        GateMode::parse(&text).ok_or_else(|| unknown("gate_mode", &GateMode::ALL.map(GateMode::as_str), &text))
    }

    fn activation(&self) -> Result<Activation, Failure> {
        let text = self.string("activation")?;
        Activation::parse(&text).ok_or_else(|| unknown("activation", &Activation::ALL.map(Activation::as_str), &text))
    }
}

fn missing(name: &str, kind: &str) -> Failure {
    Failure::argument(format!("attribute `{name}` of type {kind} is missing"))
}

fn unknown(name: &str, known: &[&str], found: &str) -> Failure {
    Failure::argument(format!("attribute `{name}` must be one of {}, found `{found}`", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use moa_schema::{AttributeKind, OPERATORS};

    use super::*;

    /// Answers every question with a legal value, except for one attribute, and writes down what was asked.
    struct Recorder {
        except: &'static str,
        asked: RefCell<Vec<(String, AttributeKind)>>,
    }

    impl Recorder {
        fn answer<T>(&self, name: &str, kind: AttributeKind, value: T) -> Option<T> {
            self.asked.borrow_mut().push((name.to_owned(), kind));
            (name != self.except).then_some(value)
        }
    }

    impl AttributeSource for Recorder {
        fn int(&self, name: &str) -> Option<i64> {
            self.answer(name, AttributeKind::Int, 1)
        }

        fn float(&self, name: &str) -> Option<f32> {
            self.answer(name, AttributeKind::Float, 0.5)
        }

        fn string(&self, name: &str) -> Option<String> {
            let text = if name == "activation" { "silu" } else { "topk_softmax" };
            self.answer(name, AttributeKind::String, text.to_owned())
        }
    }

    #[test]
    fn exactly_the_declared_attributes_are_read() {
        for operator in OPERATORS {
            let recorder = Recorder { except: "", asked: RefCell::default() };
            Attributes::read(&operator, &recorder).unwrap();
            let declared: Vec<_> = operator.attributes.iter().map(|a| (a.name.to_owned(), a.kind)).collect();
            assert_eq!(recorder.asked.into_inner(), declared);
        }
    }

    #[test]
    fn every_missing_attribute_is_named() {
        for operator in OPERATORS {
            for attribute in operator.attributes {
                let recorder = Recorder { except: attribute.name, asked: RefCell::default() };
                let failure = Attributes::read(&operator, &recorder).expect_err("an attribute is missing");
                assert!(failure.text.starts_with(&format!("attribute `{}` of type ", attribute.name)), "{failure:?}");
            }
        }
    }

    struct Fixed(i64, f32, &'static str);

    impl AttributeSource for Fixed {
        fn int(&self, _: &str) -> Option<i64> {
            Some(self.0)
        }

        fn float(&self, _: &str) -> Option<f32> {
            Some(self.1)
        }

        fn string(&self, _: &str) -> Option<String> {
            Some(self.2.to_owned())
        }
    }

    #[test]
    fn another_version_of_the_operators_is_refused() {
        struct Written(Option<&'static str>);

        impl AttributeSource for Written {
            fn int(&self, _: &str) -> Option<i64> {
                None
            }

            fn float(&self, _: &str) -> Option<f32> {
                None
            }

            fn string(&self, name: &str) -> Option<String> {
                self.0.filter(|_| name == "plugin_version").map(str::to_owned)
            }
        }

        for same in [None, Some("1")] {
            check_version(&Written(same)).unwrap();
        }
        for other in ["2", "0", "1.1", ""] {
            let failure = check_version(&Written(Some(other))).expect_err(other);
            let expected =
                format!("the model needs version {other} of the operators ai.moa, and this libmoa_ort has version 1:");
            assert!(failure.text.starts_with(&expected), "{}", failure.text);
        }
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (source, expected) in [
            (Fixed(0, 1.0, "topk_softmax"), "attribute `top_k` must be at least 1, found 0"),
            (Fixed(-3, 1.0, "topk_softmax"), "attribute `top_k` must be at least 1, found -3"),
            (Fixed(2, 1.0, "topk_softmax"), "attribute `causal` must be 0 or 1, found 2"),
            (Fixed(1, f32::NAN, "topk_softmax"), "attribute `scale` must be finite, found NaN"),
            (
                Fixed(1, 1.0, "Softmax"),
                "attribute `gate_mode` must be one of softmax_topk, softmax_topk_renorm, topk_softmax, found `Softmax`",
            ),
        ] {
            let failure = Attributes::read(&SELF_ATTENTION, &source).expect_err(expected);
            assert_eq!(failure, Failure::argument(expected));
        }
        let failure = Attributes::read(&FEED_FORWARD, &Fixed(1, 1.0, "topk_softmax")).expect_err("activation");
        assert_eq!(failure.text, "attribute `activation` must be one of relu, gelu, silu, found `topk_softmax`");
    }
}
