//! Attributes of a node, read from whatever holds them.

use std::fmt;

use crate::{
    ACCURACY_LEVEL, AccuracyLevel, Activation, AttentionMode, Attribute, AttributeKind, CROSS_ATTENTION,
    CrossAttentionAttributes, FEED_FORWARD, FeedForwardAttributes, GateMode, LM_HEAD, OPSET_VERSION, OUTPUT_COUNT,
    Operator, PLUGIN_NAMESPACE, PLUGIN_VERSION, PRESENT_INPUTS, SELF_ATTENTION, SelfAttentionAttributes, attribute,
};

/// Where attributes come from; `None` where the node has none of that name and type.
pub trait AttributeSource {
    /// An attribute of type `INT`.
    fn int(&self, name: &str) -> Option<i64>;
    /// An attribute of type `FLOAT`.
    fn float(&self, name: &str) -> Option<f32>;
    /// An attribute of type `STRING`.
    fn string(&self, name: &str) -> Option<String>;
    /// Whether the node has an attribute of that name, of whatever type.
    fn has(&self, name: &str) -> bool;
}

/// Attributes that a node may have beside those of its operator.
pub const FURTHER_ATTRIBUTES: [Attribute; 5] = [
    Attribute { name: ACCURACY_LEVEL, kind: AttributeKind::Int },
    Attribute { name: PRESENT_INPUTS, kind: AttributeKind::Int },
    Attribute { name: OUTPUT_COUNT, kind: AttributeKind::Int },
    Attribute { name: PLUGIN_VERSION, kind: AttributeKind::String },
    Attribute { name: PLUGIN_NAMESPACE, kind: AttributeKind::String },
];

/// Refuses [`FURTHER_ATTRIBUTES`] that the node has with another type than theirs.
///
/// # Errors
///
/// Names the attribute and its type.
pub fn check_further_attributes(source: &dyn AttributeSource) -> Result<(), AttributeError> {
    for Attribute { name, kind } in FURTHER_ATTRIBUTES {
        let fits = match kind {
            AttributeKind::Int => source.int(name).is_some(),
            AttributeKind::Float => source.float(name).is_some(),
            AttributeKind::String => source.string(name).is_some(),
        };
        if !fits && source.has(name) {
            return Err(AttributeError(format!("attribute `{name}` must be of type {kind}")));
        }
    }
    Ok(())
}

/// The version of the operators that a node says it is written for, where it is another than [`OPSET_VERSION`].
pub fn other_version(source: &dyn AttributeSource) -> Option<String> {
    source.string(PLUGIN_VERSION).filter(|written| *written != OPSET_VERSION.to_string())
}

/// The accuracy level of a node; that of one that has no such attribute is the default.
///
/// # Errors
///
/// Where there is no level of that number.
pub fn accuracy_level(source: &dyn AttributeSource) -> Result<AccuracyLevel, AttributeError> {
    let Some(number) = source.int(ACCURACY_LEVEL) else { return Ok(AccuracyLevel::default()) };
    AccuracyLevel::ALL.into_iter().find(|level| level.number() == number).ok_or_else(|| {
        let [all @ .., last] = AccuracyLevel::ALL.map(|level| level.number().to_string());
        AttributeError(format!("attribute `{ACCURACY_LEVEL}` must be {} or {last}, found {number}", all.join(", ")))
    })
}

/// An attribute is missing, or has a value that its operator does not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttributeError(String);

impl fmt::Display for AttributeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AttributeError {}

/// The attributes of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Attributes {
    /// Those of [`SELF_ATTENTION`].
    SelfAttention(SelfAttentionAttributes),
    /// Those of [`CROSS_ATTENTION`].
    CrossAttention(CrossAttentionAttributes),
    /// Those of [`FEED_FORWARD`].
    FeedForward(FeedForwardAttributes),
    /// Those of [`LM_HEAD`], which has none.
    LmHead,
}

impl Attributes {
    /// The operator that has them.
    pub const fn operator(&self) -> &'static Operator {
        match self {
            Self::SelfAttention(_) => &SELF_ATTENTION,
            Self::CrossAttention(_) => &CROSS_ATTENTION,
            Self::FeedForward(_) => &FEED_FORWARD,
            Self::LmHead => &LM_HEAD,
        }
    }

    /// Reads what `operator` declares.
    ///
    /// # Errors
    ///
    /// Where an attribute is missing, of another type or out of range, or `operator` is none of [`crate::OPERATORS`].
    pub fn read(operator: &Operator, source: &dyn AttributeSource) -> Result<Self, AttributeError> {
        let reader = Reader { source };
        match operator.name {
            name if name == SELF_ATTENTION.name => Ok(Self::SelfAttention(SelfAttentionAttributes {
                top_k: reader.count(attribute::TOP_K)?,
                kv_num_heads: reader.count(attribute::KV_NUM_HEADS)?,
                causal: reader.flag(attribute::CAUSAL)?,
                scale: reader.finite(attribute::SCALE)?,
                gate_mode: reader.gate_mode()?,
                skip_padded_queries: reader.flag(attribute::SKIP_PADDED_QUERIES)?,
                attention_mode: reader.attention_mode()?,
            })),
            name if name == CROSS_ATTENTION.name => Ok(Self::CrossAttention(CrossAttentionAttributes {
                top_k: reader.count(attribute::TOP_K)?,
                kv_num_heads: reader.count(attribute::KV_NUM_HEADS)?,
                scale: reader.finite(attribute::SCALE)?,
                gate_mode: reader.gate_mode()?,
                skip_padded_queries: reader.flag(attribute::SKIP_PADDED_QUERIES)?,
            })),
            name if name == FEED_FORWARD.name => Ok(Self::FeedForward(FeedForwardAttributes {
                top_k: reader.count(attribute::TOP_K)?,
                gate_mode: reader.gate_mode()?,
                activation: reader.activation()?,
                gated: reader.flag(attribute::GATED)?,
            })),
            name if name == LM_HEAD.name => Ok(Self::LmHead),
            name => Err(AttributeError(format!("{name} is no operator of {}", crate::DOMAIN))),
        }
    }
}

/// Characters of a text that an error shows.
const LONGEST_SHOWN: usize = 64;

struct Reader<'a> {
    source: &'a dyn AttributeSource,
}

impl Reader<'_> {
    fn int(&self, name: &str) -> Result<i64, AttributeError> {
        self.source.int(name).ok_or_else(|| missing(name, AttributeKind::Int))
    }

    fn count(&self, name: &str) -> Result<usize, AttributeError> {
        let value = self.int(name)?;
        match usize::try_from(value) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(AttributeError(format!("attribute `{name}` must be at least 1, found {value}"))),
        }
    }

    fn flag(&self, name: &str) -> Result<bool, AttributeError> {
        match self.int(name)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(AttributeError(format!("attribute `{name}` must be 0 or 1, found {value}"))),
        }
    }

    fn finite(&self, name: &str) -> Result<f32, AttributeError> {
        let value = self.source.float(name).ok_or_else(|| missing(name, AttributeKind::Float))?;
        if value.is_finite() {
            return Ok(value);
        }
        Err(AttributeError(format!("attribute `{name}` must be finite, found {value}")))
    }

    fn string(&self, name: &str) -> Result<String, AttributeError> {
        self.source.string(name).ok_or_else(|| missing(name, AttributeKind::String))
    }

    fn gate_mode(&self) -> Result<GateMode, AttributeError> {
        let text = self.string(attribute::GATE_MODE)?;
        GateMode::parse(&text).ok_or_else(|| unknown(attribute::GATE_MODE, &GateMode::ALL.map(GateMode::as_str), &text))
    }

    /// Read behind `causal`, which stick-breaking needs.
    fn attention_mode(&self) -> Result<AttentionMode, AttributeError> {
        let text = self.string(attribute::ATTENTION_MODE)?;
        let known = AttentionMode::ALL.map(AttentionMode::as_str);
        let mode = AttentionMode::parse(&text).ok_or_else(|| unknown(attribute::ATTENTION_MODE, &known, &text))?;
        if mode == AttentionMode::StickBreaking && !self.flag(attribute::CAUSAL)? {
            let text = format!("attribute `attention_mode` is {}, which needs `causal` = 1", mode.as_str());
            return Err(AttributeError(text));
        }
        Ok(mode)
    }

    fn activation(&self) -> Result<Activation, AttributeError> {
        let text = self.string(attribute::ACTIVATION)?;
        Activation::parse(&text)
            .ok_or_else(|| unknown(attribute::ACTIVATION, &Activation::ALL.map(Activation::as_str), &text))
    }
}

fn missing(name: &str, kind: AttributeKind) -> AttributeError {
    AttributeError(format!("attribute `{name}` of type {kind} is missing"))
}

fn unknown(name: &str, known: &[&str], found: &str) -> AttributeError {
    let found: String = found.escape_debug().take(LONGEST_SHOWN).collect();
    AttributeError(format!("attribute `{name}` must be one of {}, found `{found}`", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::OPERATORS;

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
            let text = match name {
                "activation" => "silu",
                "attention_mode" => "softmax",
                _ => "topk_softmax",
            };
            self.answer(name, AttributeKind::String, text.to_owned())
        }

        fn has(&self, name: &str) -> bool {
            name != self.except
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
                assert!(failure.0.starts_with(&format!("attribute `{}` of type ", attribute.name)), "{failure:?}");
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

        fn has(&self, _: &str) -> bool {
            true
        }
    }

    /// Stick-breaking without an order of keys.
    struct Sticks;

    impl AttributeSource for Sticks {
        fn int(&self, name: &str) -> Option<i64> {
            Some(i64::from(name != "causal"))
        }

        fn float(&self, _: &str) -> Option<f32> {
            Some(1.0)
        }

        fn string(&self, name: &str) -> Option<String> {
            Some(if name == "attention_mode" { "stick_breaking" } else { "softmax_topk" }.to_owned())
        }

        fn has(&self, _: &str) -> bool {
            true
        }
    }

    #[test]
    fn nodes_have_the_accuracy_that_they_say_or_that_of_their_activations() {
        assert_eq!(accuracy_level(&Only("top_k", None)), Ok(AccuracyLevel::Activations));
        for (number, level) in [(0, AccuracyLevel::Activations), (3, AccuracyLevel::Bf16), (4, AccuracyLevel::Int8)] {
            assert_eq!(accuracy_level(&Fixed(number, 0.0, "")), Ok(level));
        }
        for number in [-1, 1, 2, 5] {
            let expected = format!("attribute `accuracy_level` must be 0, 3 or 4, found {number}");
            assert_eq!(accuracy_level(&Fixed(number, 0.0, "")), Err(AttributeError(expected)));
        }
    }

    /// One attribute of one type, or of a type that no operator has.
    struct Only(&'static str, Option<AttributeKind>);

    impl Only {
        fn answer<T>(&self, name: &str, kind: AttributeKind, value: T) -> Option<T> {
            (name == self.0 && self.1 == Some(kind)).then_some(value)
        }
    }

    impl AttributeSource for Only {
        fn int(&self, name: &str) -> Option<i64> {
            self.answer(name, AttributeKind::Int, 4)
        }

        fn float(&self, name: &str) -> Option<f32> {
            self.answer(name, AttributeKind::Float, 4.0)
        }

        fn string(&self, name: &str) -> Option<String> {
            self.answer(name, AttributeKind::String, "4".to_owned())
        }

        fn has(&self, name: &str) -> bool {
            name == self.0
        }
    }

    #[test]
    fn further_attributes_have_their_types() {
        let kinds = [None, Some(AttributeKind::Int), Some(AttributeKind::Float), Some(AttributeKind::String)];
        for Attribute { name, kind } in FURTHER_ATTRIBUTES {
            for found in kinds {
                let refusal = AttributeError(format!("attribute `{name}` must be of type {kind}"));
                let expected = if found == Some(kind) { Ok(()) } else { Err(refusal) };
                assert_eq!(check_further_attributes(&Only(name, found)), expected, "{found:?}");
            }
        }
        assert_eq!(check_further_attributes(&Only("top_k", None)), Ok(()));
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
            assert_eq!(failure.to_string(), expected);
        }
        let failure = Attributes::read(&SELF_ATTENTION, &Sticks).expect_err("a stick needs an order of keys");
        assert_eq!(failure.0, "attribute `attention_mode` is stick_breaking, which needs `causal` = 1");
        let failure = Attributes::read(&FEED_FORWARD, &Fixed(1, 1.0, "topk_softmax")).expect_err("activation");
        assert_eq!(
            failure.0,
            "attribute `activation` must be one of relu, gelu, gelu_tanh, silu, found `topk_softmax`"
        );
    }
}
