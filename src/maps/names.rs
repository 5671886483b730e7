//! Matches tensor names with the patterns of a map, and writes names from coordinates.

use std::collections::BTreeMap;

use super::cell::{Axis, NamePart, NamePattern, Offset};
use super::sizes::Sizes;

/// The coordinates that a name gives for the variables of a pattern, and the text that `**` stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameMatch {
    pub coordinates: BTreeMap<Axis, u64>,
    pub rest: Box<str>,
}

impl NamePattern {
    /// Matches a name. A number matches if it has no leading zeros, and if its coordinate is below the size of its axis,
    /// where this size is known. If an offset is a size that is unknown, no number matches.
    pub fn matches(&self, name: &str, sizes: &Sizes) -> Option<NameMatch> {
        let mut found = NameMatch::default();
        match_parts(&self.parts, name, sizes, &mut found).then_some(found)
    }

    /// Writes the name at these coordinates. Returns `None` if a coordinate or an offset is unknown.
    pub fn name(&self, at: &NameMatch, sizes: &Sizes) -> Option<String> {
        let mut name = String::new();
        for part in &self.parts {
            match part {
                NamePart::Text(text) => name += text,
                NamePart::Number { axis, offset } => {
                    let number = at.coordinates.get(axis)?.checked_add(offset_value(offset, sizes)?)?;
                    name += &number.to_string();
                }
                NamePart::Words { axis, words } => {
                    name += words.get(usize::try_from(*at.coordinates.get(axis)?).ok()?)?;
                }
                NamePart::Variable { .. } => return None,
                NamePart::Rest => name += &at.rest,
            }
        }
        Some(name)
    }

    /// Returns the text after the last variable. Each name that the pattern matches ends with it.
    pub fn end(&self) -> &str {
        match self.parts.last() {
            Some(NamePart::Text(text)) => text,
            _ => "",
        }
    }

    /// Returns the number of words of an axis of the name; `None` if the axis is a number.
    pub fn word_count(&self, axis: &Axis) -> Option<u64> {
        self.parts.iter().find_map(|part| match part {
            NamePart::Words { axis: own, words } if own == axis => Some(words.len() as u64),
            _ => None,
        })
    }
}

fn match_parts(parts: &[NamePart], text: &str, sizes: &Sizes, found: &mut NameMatch) -> bool {
    let Some((first, others)) = parts.split_first() else { return text.is_empty() };
    match first {
        NamePart::Text(own) => text.strip_prefix(&**own).is_some_and(|text| match_parts(others, text, sizes, found)),
        NamePart::Rest => {
            found.rest = text.into();
            true
        }
        // The parser puts text after a number, so the number ends at the first byte that is not a digit.
        NamePart::Number { axis, offset } => {
            let len = text.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, text) = text.split_at(len);
            let is_canonical = digits == "0" || !digits.starts_with('0');
            let coordinate = digits.parse().ok().filter(|_| is_canonical).and_then(|number: u64| {
                number
                    .checked_sub(offset_value(offset, sizes)?)
                    .filter(|at| sizes.get(axis).is_none_or(|size| *at < size))
            });
            coordinate.is_some_and(|coordinate| {
                found.coordinates.insert(axis.clone(), coordinate);
                match_parts(others, text, sizes, found)
            })
        }
        NamePart::Words { axis, words } => (0..).zip(words).any(|(index, word)| {
            text.strip_prefix(&**word).is_some_and(|text| {
                found.coordinates.insert(axis.clone(), index);
                match_parts(others, text, sizes, found)
            })
        }),
        NamePart::Variable { .. } => false,
    }
}

fn offset_value(offset: &Offset, sizes: &Sizes) -> Option<u64> {
    match offset {
        Offset::Number(number) => Some(*number),
        Offset::Size(axis) => sizes.get(axis),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(known: &[(&str, u64)]) -> Sizes {
        let known: Vec<(String, u64)> = known.iter().map(|(axis, size)| ((*axis).to_owned(), *size)).collect();
        Sizes::new(&[], &known, None).unwrap()
    }

    /// Returns a pattern in which each `{x}` without words is a number, as in a complete row.
    fn pattern(text: &str) -> NamePattern {
        let mut pattern = NamePattern::parse(text).unwrap();
        for part in &mut pattern.parts {
            if let NamePart::Variable { axis } = part {
                *part = NamePart::Number { axis: axis.clone(), offset: Offset::Number(0) };
            }
        }
        pattern
    }

    #[test]
    fn name_gives_the_coordinates_from_which_it_is_written() {
        let known = sizes(&[("l", 61), ("n", 4)]);
        for (text, name, coordinates, rest) in [
            ("a.{i}.w", "a.10.w", &[("i", 10)][..], ""),
            ("{x:gate,gate_up}_proj.weight", "gate_up_proj.weight", &[("x", 1)], ""),
            ("layers.{l}.**", "layers.60.mlp.w", &[("l", 60)], "mlp.w"),
            ("layers.{m+l}.norm", "layers.61.norm", &[("m", 0)], ""),
            ("{i+1}.w", "3.w", &[("i", 2)], ""),
            ("**", "anything", &[], "anything"),
        ] {
            let pattern = pattern(text);
            let found = pattern.matches(name, &known).unwrap();
            let expected: BTreeMap<Axis, u64> = coordinates.iter().map(|(axis, at)| ((*axis).into(), *at)).collect();
            assert_eq!((&found.coordinates, &*found.rest), (&expected, rest), "{text}");
            assert_eq!(pattern.name(&found, &known).as_deref(), Some(name));
        }
    }

    #[test]
    fn number_beyond_its_size_or_with_leading_zeros_does_not_match() {
        let known = sizes(&[("l", 61)]);
        for (text, name) in [
            ("layers.{l}.w", "layers.61.w"),
            ("layers.{l}.w", "layers.07.w"),
            ("layers.{l}.w", "layers..w"),
            ("layers.{l}.w", "layers.99999999999999999999.w"),
            ("layers.{m+l}.w", "layers.60.w"),
            ("layers.{m+q}.w", "layers.60.w"),
            ("a.{x:b,c}", "a.d"),
            ("a", "ab"),
        ] {
            assert_eq!(pattern(text).matches(name, &known), None, "{text} {name}");
        }
    }
}
