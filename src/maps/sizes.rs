//! The sizes of axes: from numbers in the map, from the user, from the model's configuration, and from shapes.
//!
//! A dim is an equation: its sum equals the size of the dim. An equation in which one axis is unknown, and occurs at most
//! once in each term, is linear in this axis, and is solved. Unit of sizes: elements.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value as Json;

use super::cell::{Axis, Factor, Product, Sum};
use super::file::{SizeKey, SizeRule, SizeValue};

/// The known sizes of axes.
#[derive(Clone, Debug, Default)]
pub struct Sizes(BTreeMap<Axis, KnownSize>);

/// A size and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownSize {
    pub value: u64,
    pub origin: SizeOrigin,
}

/// The origin of a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeOrigin {
    /// The map gives the number.
    Map,
    /// The user gives the number (`options::set`).
    User,
    /// A key of the model's configuration has the number.
    Config(String),
    /// The shape of this tensor.
    Shape(String),
    /// The number of tensors with these names.
    Names(String),
}

impl SizeOrigin {
    /// Describes the origin. `config` is the name of the configuration's file.
    pub fn describe(&self, config: &str) -> String {
        match self {
            Self::Config(key) => format!("`{key}` of {config}"),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for SizeOrigin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map => write!(formatter, "the map"),
            Self::User => write!(formatter, "options::set"),
            Self::Config(key) => write!(formatter, "`{key}` of the configuration"),
            Self::Shape(name) => write!(formatter, "the shape of {name}"),
            Self::Names(name) => write!(formatter, "the number of tensors {name}"),
        }
    }
}

/// Two different values for one size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the size {axis} is {} by {}, and {} by {}", values[0].value, values[0].origin, values[1].value, values[1].origin)]
pub struct SizeConflict {
    pub axis: Axis,
    pub values: [KnownSize; 2],
}

/// A dim whose size does not fit the sizes of its axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DimFault {
    /// These axes are unknown.
    Unknown(Vec<Axis>),
    /// No size of this axis gives the size of the dim.
    NotDivisible { axis: Axis, by: u128, rest: u128 },
    /// All axes are known, and give this size.
    Differs(u128),
    /// The size exceeds 64 bits.
    TooLarge,
}

impl Sizes {
    /// Returns the sizes of a map that are known before a checkpoint is read. `given` are the sizes from the user.
    ///
    /// # Errors
    /// [`SizeConflict`] if a quotient is not exact, or the user and the map give different numbers.
    pub fn new(rules: &[SizeRule], given: &[(String, u64)], config: Option<&Json>) -> Result<Self, SizeConflict> {
        let mut sizes = Self::default();
        for (axis, value) in given {
            sizes.insert(&axis.as_str().into(), KnownSize { value: *value, origin: SizeOrigin::User })?;
        }
        // A rule may refer to a later rule, so the rules are applied until nothing changes.
        while rules.iter().try_fold(false, |has_changed, rule| Ok(sizes.apply(rule, config)? || has_changed))? {}
        Ok(sizes)
    }

    /// Applies a rule. Returns whether the axis was unknown and is now known. A number of the configuration or the map must not
    /// contradict a number from the user.
    fn apply(&mut self, rule: &SizeRule, config: Option<&Json>) -> Result<bool, SizeConflict> {
        let is_known = self.get(&rule.axis).is_some();
        let found = match &rule.value {
            SizeValue::Number(number) => Some(KnownSize { value: *number, origin: SizeOrigin::Map }),
            SizeValue::FirstOf(keys) => keys.iter().find_map(|key| match key {
                // A size stands in for a key that the configuration lacks. Without a configuration, the key may exist. The size does
                // not contradict a number from the user.
                SizeKey::Size(axis) => self.0.get(axis).filter(|_| !is_known && config.is_some()).cloned(),
                SizeKey::Config(key) => {
                    let value = config_number(config?, key)?;
                    Some(KnownSize { value, origin: SizeOrigin::Config(key.clone()) })
                }
            }),
            SizeValue::Quotient(dividend, divisor) => match (self.0.get(dividend), self.0.get(divisor)) {
                _ if is_known => None,
                (Some(dividend), Some(divisor)) if divisor.value > 0 && dividend.value % divisor.value == 0 => {
                    Some(KnownSize { value: dividend.value / divisor.value, origin: dividend.origin.clone() })
                }
                (Some(dividend), Some(divisor)) => {
                    let values = [dividend.clone(), divisor.clone()];
                    return Err(SizeConflict { axis: rule.axis.clone(), values });
                }
                _ => None,
            },
        };
        found.map_or(Ok(false), |found| self.insert(&rule.axis, found))
    }

    /// Returns the size of an axis, if it is known.
    pub fn get(&self, axis: &Axis) -> Option<u64> {
        self.0.get(axis).map(|known| known.value)
    }

    /// Returns the size of an axis with its origin, if it is known.
    pub fn known(&self, axis: &Axis) -> Option<&KnownSize> {
        self.0.get(axis)
    }

    /// Adds a size. Returns whether the axis was unknown.
    ///
    /// # Errors
    /// [`SizeConflict`] if the axis has another size.
    pub fn insert(&mut self, axis: &Axis, found: KnownSize) -> Result<bool, SizeConflict> {
        match self.0.get(axis) {
            None => {
                self.0.insert(axis.clone(), found);
                Ok(true)
            }
            Some(known) if known.value == found.value => Ok(false),
            Some(known) => Err(SizeConflict { axis: axis.clone(), values: [known.clone(), found] }),
        }
    }

    /// Solves the equation of a dim for its only unknown axis. Returns the axis and its size; `None` if all axes are known
    /// and give the size of the dim.
    ///
    /// # Errors
    /// [`DimFault`] if several axes are unknown, or if the sizes do not fit.
    pub fn solve(&self, sum: &Sum, size: u64) -> Result<Option<(Axis, u64)>, DimFault> {
        let unknown: Vec<Axis> = sum.axes().into_iter().filter(|axis| self.get(axis).is_none()).cloned().collect();
        match unknown.as_slice() {
            [] => match self.value(sum) {
                Some(value) if value == u128::from(size) => Ok(None),
                Some(value) => Err(DimFault::Differs(value)),
                None => Err(DimFault::TooLarge),
            },
            [axis] => {
                let Linear { constant, factor } =
                    self.linear(sum, axis).ok_or(DimFault::Unknown(vec![axis.clone()]))?;
                let not_divisible = |rest| DimFault::NotDivisible { axis: axis.clone(), by: factor, rest };
                let rest = u128::from(size).checked_sub(constant).ok_or(DimFault::Differs(constant))?;
                if factor == 0 || !rest.is_multiple_of(factor) {
                    return Err(not_divisible(rest));
                }
                Ok(Some((axis.clone(), u64::try_from(rest / factor).map_err(|_| DimFault::TooLarge)?)))
            }
            _ => Err(DimFault::Unknown(unknown)),
        }
    }

    /// Returns the value of a sum whose axes are all known; `None` if an axis is unknown or the value exceeds 128 bits.
    pub fn value(&self, sum: &Sum) -> Option<u128> {
        let Linear { constant, factor } = self.linear(sum, &"".into())?;
        (factor == 0).then_some(constant)
    }

    /// Returns a sum as a linear function of an axis. All other axes must be known.
    fn linear(&self, sum: &Sum, axis: &Axis) -> Option<Linear> {
        let mut total = Linear { constant: 0, factor: 0 };
        for Product(factors) in &sum.0 {
            let mut term = Linear { constant: 1, factor: 0 };
            for factor in factors {
                term = term.times(&match factor {
                    Factor::One => continue,
                    Factor::Axis(own) | Factor::Padding(own) | Factor::Copies(own) if own == axis => {
                        Linear { constant: 0, factor: 1 }
                    }
                    Factor::Axis(own) | Factor::Padding(own) | Factor::Copies(own) => {
                        Linear { constant: self.get(own)?.into(), factor: 0 }
                    }
                    Factor::Group(inner) => self.linear(inner, axis)?,
                })?;
            }
            total.constant = total.constant.checked_add(term.constant)?;
            total.factor = total.factor.checked_add(term.factor)?;
        }
        Some(total)
    }
}

/// The function `constant + factor * axis`.
struct Linear {
    constant: u128,
    factor: u128,
}

impl Linear {
    /// Multiplies two functions; `None` if the result is not linear or exceeds 128 bits.
    fn times(&self, other: &Self) -> Option<Self> {
        if self.factor > 0 && other.factor > 0 {
            return None;
        }
        let factor = self.constant.checked_mul(other.factor)?.checked_add(self.factor.checked_mul(other.constant)?)?;
        Some(Self { constant: self.constant.checked_mul(other.constant)?, factor })
    }
}

/// Returns the number at a key of a configuration. Dots in the key separate the keys of nested objects.
fn config_number(config: &Json, key: &str) -> Option<u64> {
    key.split('.').try_fold(config, |value, key| value.get(key))?.as_u64()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::maps::cell::{Dim, TensorPattern};

    fn sum(text: &str) -> Sum {
        match TensorPattern::parse("", &format!("w [{text}]")).unwrap().dims.remove(0) {
            Dim::Sum(sum) => sum,
            Dim::Rest => panic!("a sum"),
        }
    }

    fn sizes(known: &[(&str, u64)]) -> Sizes {
        let known: Vec<(String, u64)> = known.iter().map(|(axis, size)| ((*axis).to_owned(), *size)).collect();
        Sizes::new(&[], &known, None).unwrap()
    }

    #[test]
    fn only_unknown_axis_of_a_dim_is_solved() {
        for (text, known, size, expected) in [
            ("i", &[][..], 7, Ok(Some(("i".into(), 7)))),
            ("(h r j)", &[("h", 4), ("r", 2)], 48, Ok(Some(("j".into(), 6)))),
            ("(h d + k d + k d)", &[("h", 8), ("k", 2)], 48, Ok(Some(("d".into(), 4)))),
            ("(k (p + 1 + 1) d)", &[("k", 2), ("d", 3)], 30, Ok(Some(("p".into(), 3)))),
            ("(v + _pad)", &[("v", 100)], 128, Ok(Some(("pad".into(), 28)))),
            ("(h d)", &[("h", 4), ("d", 8)], 32, Ok(None)),
            ("(h d)", &[("h", 4), ("d", 8)], 33, Err(DimFault::Differs(32))),
            ("(h j)", &[("h", 5)], 48, Err(DimFault::NotDivisible { axis: "j".into(), by: 5, rest: 48 })),
            ("(h j)", &[], 48, Err(DimFault::Unknown(vec!["h".into(), "j".into()]))),
            ("(h d + k d)", &[("h", 8)], 48, Err(DimFault::Unknown(vec!["d".into(), "k".into()]))),
            ("(a (b + 1))", &[("a", 4)], 2, Err(DimFault::Differs(4))),
        ] {
            let found = sizes(known).solve(&sum(text), size);
            let sorted = found.map_err(|fault| match fault {
                DimFault::Unknown(mut axes) => {
                    axes.sort();
                    DimFault::Unknown(axes)
                }
                fault => fault,
            });
            assert_eq!(sorted, expected, "{text}");
        }
    }

    #[test]
    fn sizes_come_from_the_first_origin_that_is_known() {
        let rule = |axis: &str, value| SizeRule { axis: axis.into(), value };
        let keys = |keys: &[&str]| {
            SizeValue::FirstOf(
                keys.iter()
                    .map(|key| match *key {
                        "h" => SizeKey::Size("h".into()),
                        key => SizeKey::Config(key.to_owned()),
                    })
                    .collect(),
            )
        };
        let rules = [
            rule("k", keys(&["text_config.num_key_value_heads", "h"])),
            rule("h", keys(&["num_attention_heads", "n_heads"])),
            rule("p", SizeValue::Quotient("h".into(), "k".into())),
        ];
        let of = |config: Json| {
            let sizes = Sizes::new(&rules, &[], Some(&config)).unwrap();
            ["h", "k", "p"].map(|axis| sizes.get(&axis.into()))
        };
        assert_eq!(of(json!({ "n_heads": 8 })), [Some(8), Some(8), Some(1)]);
        let nested = json!({ "num_attention_heads": 8, "text_config": { "num_key_value_heads": 2 } });
        assert_eq!(of(nested), [Some(8), Some(2), Some(4)]);
        assert_eq!(of(json!({})), [None, None, None]);
        let given = Sizes::new(&rules, &[("h".into(), 6), ("k".into(), 4)], None).unwrap_err();
        assert_eq!(given.axis, "p".into());
    }
}
