//! Casts: the dtype in which each tensor is written (`options::dtype`).
//!
//! A dtype without a pattern applies to the weights of a model: f32, f16 and bf16 tensors with at least one dim,
//! outside optimizer state. A dtype with a pattern also applies to f64 tensors. A dtype with a pattern applies to
//! optimizer state and to the scales of quantised tensors only if the pattern covers the name of the state tensor or of
//! the scale. If several patterns cover a tensor, the first pattern decides. Invariant: integers, bools, complex
//! numbers, 8-bit floats and 0-d tensors are never cast.

use super::MatchedNames;
use super::filter::nearest_names;
use super::scales::{Quantised, is_small_float};
use super::survey::Survey;
use crate::catalog::path::tensors;
use crate::catalog::{Catalog, Dtype, Path};
use crate::error::{Error, Result};
use crate::layout::Pattern;

/// A cast rule: `bf16`, or `PATTERN=f32`. [`DtypeRule::parse`] accepts only dtypes that tensors can be cast to.
#[derive(Clone, Debug)]
pub struct DtypeRule {
    pub pattern: Option<Pattern>,
    pub dtype: Dtype,
}

impl DtypeRule {
    /// Parses a rule.
    ///
    /// # Errors
    /// `Usage` for an unknown dtype or a dtype to which tensors cannot be cast, and `Layout` for an invalid pattern.
    pub fn parse(text: &str) -> Result<Self> {
        let (pattern, name) = match text.rsplit_once('=') {
            Some((pattern, name)) => (Some(Pattern::parse(pattern.trim())?), name.trim()),
            None => (None, text.trim()),
        };
        let targets = Dtype::CAST_TARGETS.map(Dtype::name).join(", ");
        let Some(dtype) = Dtype::from_name(name) else {
            return Err(Error::usage(
                format!("options::dtype {text}: unknown dtype `{name}`"),
                format!("use one of {targets}"),
            ));
        };
        if !Dtype::CAST_TARGETS.contains(&dtype) {
            return Err(Error::usage(
                format!("options::dtype {text}: tensors cannot be cast to {dtype}"),
                format!("use one of {targets}"),
            ));
        }
        Ok(Self { pattern, dtype })
    }
}

/// The reason why a tensor keeps its dtype although a rule matches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeptReason {
    Scalar,
    OptimizerState,
    /// The tensor is the scale of a quantised tensor, which is cast only by a rule with a pattern.
    Scale,
    /// The tensor is f64, which is cast only by a rule with a pattern.
    Double,
    NotFloat,
}

impl KeptReason {
    /// Returns the text of the reason for messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scalar => "0-d",
            Self::OptimizerState => "optimizer state",
            Self::Scale => "scales of quantised tensors",
            Self::Double => "f64",
            Self::NotFloat => "not float",
        }
    }
}

/// The number of tensors that are cast, and the number of tensors that keep their dtype although a cast rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CastSummary {
    /// The number of tensors that are cast, by old and new dtype.
    pub cast: Vec<(Dtype, Dtype, usize)>,
    /// The number of tensors that keep their dtype, by reason.
    pub kept: Vec<(KeptReason, usize)>,
}

impl CastSummary {
    fn count_cast(&mut self, from: Dtype, to: Dtype) {
        match self.cast.iter_mut().find(|known| (known.0, known.1) == (from, to)) {
            Some(known) => known.2 += 1,
            None => self.cast.push((from, to, 1)),
        }
    }

    fn count_kept(&mut self, reason: KeptReason) {
        match self.kept.iter_mut().find(|known| known.0 == reason) {
            Some(known) => known.1 += 1,
            None => self.kept.push((reason, 1)),
        }
    }

    /// Returns a note about the tensors that are not cast, such as `options::dtype does not cast 12 tensors (0-d), 3
    /// tensors (not float)`. Returns nothing if there are no such tensors.
    pub(super) fn notes(&self) -> Vec<String> {
        let part = |(kept, number): &(KeptReason, usize)| {
            format!("{number} {} ({})", if *number == 1 { "tensor" } else { "tensors" }, kept.as_str())
        };
        let parts: Vec<String> = self.kept.iter().map(part).collect();
        if parts.is_empty() { Vec::new() } else { vec![format!("options::dtype does not cast {}", parts.join(", "))] }
    }
}

/// The properties of a tensor on which cast rules depend.
#[derive(Clone, Copy, Default)]
struct SelectedTensor {
    is_selected: bool,
    /// True if at least one name of the tensor is not the name of optimizer state.
    outside_optimizer: bool,
    /// True if one of the tensor's names is the name of a quantised tensor's scale.
    is_scale: bool,
    /// The index of the first cast rule with a pattern that covers one of the tensor's names; `None` if there is no
    /// such rule.
    rule: Option<usize>,
}

/// Sets the dtypes of the tensors in the new state dict, and counts the casts.
pub(super) fn apply(
    survey: &Survey<'_>,
    kept: &[bool],
    catalog: &mut Catalog,
    rules: &[DtypeRule],
    matched: MatchedNames,
) -> Result<CastSummary> {
    if rules.is_empty() {
        return Ok(CastSummary::default());
    }
    let mut bare = rules.iter().filter(|rule| rule.pattern.is_none());
    let fallback = bare.next().map(|rule| rule.dtype);
    if let Some(second) = bare.next() {
        return Err(Error::usage(
            format!("options::dtype {}: expected one dtype without a pattern, found a second one", second.dtype),
            "give one dtype without a pattern, and PATTERN=DTYPE for exceptions",
        ));
    }
    let mut seen = vec![SelectedTensor::default(); catalog.tensors.len()];
    let mut used: Vec<bool> = rules.iter().map(|rule| rule.pattern.is_none()).collect();
    let mut try_names = |seen: &mut SelectedTensor, names: &[&str]| {
        for (index, (rule, used)) in rules.iter().zip(&mut used).enumerate() {
            let Some(pattern) = &rule.pattern else { continue };
            let better = seen.rule.is_none_or(|known| index < known);
            if (better || !*used) && names.iter().any(|name| pattern.covers(name)) {
                *used = true;
                seen.rule = seen.rule.filter(|_| !better).or(Some(index));
            }
        }
    };
    let mut quantised = Quantised::default();
    for leaf in &survey.leaves {
        survey.clean_tensors(*leaf, &mut |name, id| quantised.add(name, catalog.tensor(id).dtype));
    }
    for (leaf, kept) in survey.leaves.iter().zip(kept) {
        survey.clean_tensors(*leaf, &mut |name, id| {
            let mut one = seen[id.0 as usize];
            let names = [Some(name), survey.in_model(name)];
            let names = survey.for_patterns(names.into_iter().flatten().map(str::to_owned).collect());
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            try_names(&mut one, &names);
            if *kept {
                one.is_selected = true;
                one.outside_optimizer |= leaf.optimizer.is_none();
                one.is_scale |= quantised.is_scale(name);
                seen[id.0 as usize] = one;
            }
        });
    }
    tensors(&catalog.state, &Path::default(), &mut |path, id| {
        try_names(&mut seen[id.0 as usize], &[&path.to_string()]);
    });
    if let Some(unused) = used.iter().position(|used| !used) {
        let (pattern, dtype) = (rules[unused].pattern.as_ref().map_or("", Pattern::as_str), rules[unused].dtype);
        let with_tensors = survey.leaves.iter().filter(|leaf| !survey.tensor_ids(**leaf).is_empty());
        return Err(Error::usage(
            format!("options::dtype {pattern}={dtype}: no tensor matches this pattern"),
            matched.hint("options::dtype", nearest_names(pattern, with_tensors, survey)),
        ));
    }
    let mut casts = CastSummary::default();
    for (entry, seen) in catalog.tensors.iter_mut().zip(&seen).filter(|(_, seen)| seen.is_selected) {
        let Some(target) = seen.rule.map(|rule| rules[rule].dtype).or(fallback) else { continue };
        if entry.dtype == target {
            continue;
        }
        match reason_to_keep(entry.dtype, entry.shape.is_empty(), *seen) {
            // 8-bit floats are small already, so they are not counted among the tensors that keep their dtype.
            Some(KeptReason::NotFloat) if is_small_float(entry.dtype) => {}
            Some(reason) => casts.count_kept(reason),
            None => {
                casts.count_cast(entry.dtype, target);
                entry.dtype = target;
            }
        }
    }
    casts.kept.sort_unstable();
    Ok(casts)
}

fn reason_to_keep(dtype: Dtype, is_scalar: bool, seen: SelectedTensor) -> Option<KeptReason> {
    let by_name = seen.rule.is_some();
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 if is_scalar => Some(KeptReason::Scalar),
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 if !by_name && !seen.outside_optimizer => {
            Some(KeptReason::OptimizerState)
        }
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 if !by_name && seen.is_scale => Some(KeptReason::Scale),
        Dtype::F64 if !by_name => Some(KeptReason::Double),
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 => None,
        _ => Some(KeptReason::NotFloat),
    }
}
