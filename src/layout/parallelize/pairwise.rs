//! The style `pairwise`: `colwise` and `rowwise` in turn for the linear child modules of a module.
//!
//! `PairwiseParallel` of PyTorch up to 2.3 paired the children that are an `nn.Linear`. A checkpoint has no classes, so
//! a child counts as linear if it has a 2-d `weight`. An `nn.Embedding` also has a 2-d `weight`, so it cannot be
//! distinguished from an `nn.Linear` without a bias. If the sizes of a pair do not fit together, this is an error. A
//! note lists the paired weights without a bias, because these may be embeddings.
//!
//! Source: `_parallelize_mlp` in `torch/distributed/tensor/parallel/style.py` of PyTorch 2.0.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;

use super::candidate::{Candidate, StyledParameter, module_of};
use super::{ParallelStyle, Parameter, ParameterOrder, PlanError, ShapeOrigin};

const IN_TURN: [ParallelStyle; 2] = [ParallelStyle::Colwise { blocks: 1 }, ParallelStyle::Rowwise { blocks: 1 }];

const WITHOUT_BIAS: &str =
    "pairwise treats a 2-d weight without a bias as an nn.Linear; give an nn.Embedding the style `none`";

/// A rule with the style `pairwise`.
pub(super) struct PairwiseRule<'a> {
    pub candidate: &'a Candidate,
    /// The child modules that the rule names; empty if the rule pairs all linear children.
    pub children: &'a [String],
    /// The order of the parameters that the rule is applied to.
    pub order: ParameterOrder,
    /// True if the plan also shards parameters with FSDP. The shapes of local shards then do not show whether two
    /// weights fit together.
    pub has_fsdp: bool,
}

/// A linear module: the name of the module, and the index of its weight in the list of parameters.
type Linear<'a> = (&'a str, usize);

impl PairwiseRule<'_> {
    /// Returns the parameters of all paired modules, each with `colwise` or `rowwise`. `is_linear` returns false for a
    /// weight that another rule gives the style of an embedding or `none`.
    pub fn bind(
        &self,
        parameters: &[Parameter<'_>],
        is_linear: impl Fn(&Parameter<'_>) -> bool,
    ) -> Result<Vec<StyledParameter>, PlanError> {
        let modules = if self.children.is_empty() {
            self.registered_children(parameters, is_linear)?
        } else {
            self.named_children(parameters)?
        };
        let with_bias: HashSet<&str> =
            parameters.iter().filter_map(|parameter| parameter.name.strip_suffix(".bias")).collect();
        let mut styles: HashMap<&str, (ParallelStyle, Option<&'static str>)> = HashMap::new();
        for (module, linears) in &modules {
            let (pairs, _) = linears.as_chunks::<2>();
            for pair in pairs {
                self.check_sizes(module, *pair, parameters)?;
                for ((linear, _), style) in pair.iter().zip(IN_TURN) {
                    let is_certain = !self.children.is_empty() || with_bias.contains(linear);
                    styles.insert(linear, (style, (!is_certain).then_some(WITHOUT_BIAS)));
                }
            }
        }
        if styles.is_empty() {
            let mut names = parameters.iter().flat_map(|parameter| ancestors(&parameter.name));
            let matched = modules.keys().next().copied();
            return match matched.or_else(|| names.find(|module| self.candidate.matches_module(module))) {
                Some(module) => Err(self.no_pair(module, modules.get(module).map_or(0, Vec::len), parameters)),
                None => Ok(Vec::new()),
            };
        }
        let styled = |(at, parameter): (usize, &Parameter<'_>)| {
            let (style, note) = styles.get(module_of(&parameter.name))?;
            Some((at, *style, note.filter(|_| parameter.shape.len() == 2)))
        };
        Ok(parameters.iter().enumerate().filter_map(styled).collect())
    }

    /// Returns the error for a module without a pair of linear children: the module has fewer than two linear children,
    /// or it has none of the children that the rule names.
    fn no_pair(&self, module: &str, found: usize, parameters: &[Parameter<'_>]) -> PlanError {
        let (origin, name) = (self.origin(), display_module(module));
        match self.children.first() {
            None => PlanError::NoPair { origin, module: name, found },
            Some(child) => {
                let children = children_of(module, parameters);
                PlanError::NoSuchChild { origin, module: name, child: child.clone(), children }
            }
        }
    }

    fn origin(&self) -> String {
        self.candidate.rule.origin.clone()
    }

    /// Returns the linear children of each module that the rule matches, in the order of registration.
    fn registered_children<'p>(
        &self,
        parameters: &'p [Parameter<'_>],
        is_linear: impl Fn(&Parameter<'_>) -> bool,
    ) -> Result<IndexMap<&'p str, Vec<Linear<'p>>>, PlanError> {
        let mut modules: IndexMap<&str, Vec<Linear<'_>>> = IndexMap::new();
        for (at, linear) in modules_with_2d_weight(parameters) {
            let module = module_of(linear);
            if !linear.is_empty() && self.candidate.matches_module(module) && is_linear(&parameters[at]) {
                modules.entry(module).or_default().push((linear, at));
            }
        }
        for (module, linears) in &mut modules {
            if linears.len() > 1 && self.order == ParameterOrder::Unknown && !sort_by_number(linears) {
                let children = linears.iter().map(|(linear, _)| own_name(linear).to_owned()).collect();
                let (origin, module) = (self.origin(), display_module(module));
                return Err(PlanError::UnknownOrder { origin, module, children });
            }
        }
        Ok(modules)
    }

    /// Returns the children that the rule names, for each module that has at least one of these children. The children
    /// are in the order of the rule.
    fn named_children<'p>(
        &self,
        parameters: &'p [Parameter<'_>],
    ) -> Result<IndexMap<&'p str, Vec<Linear<'p>>>, PlanError> {
        let mut found: IndexMap<&str, Vec<Option<Linear<'_>>>> = IndexMap::new();
        for (at, linear) in modules_with_2d_weight(parameters) {
            for (number, child) in self.children.iter().enumerate() {
                if let Some(module) = parent_of(linear, child)
                    && self.candidate.matches_module(module)
                {
                    let children = found.entry(module).or_insert_with(|| vec![None; self.children.len()]);
                    children[number] = Some((linear, at));
                }
            }
        }
        let complete =
            |(module, children): (&'p str, Vec<Option<Linear<'p>>>)| match children.iter().position(Option::is_none) {
                None => Ok((module, children.into_iter().flatten().collect())),
                Some(absent) => Err(PlanError::NoSuchChild {
                    origin: self.origin(),
                    module: display_module(module),
                    child: self.children[absent].clone(),
                    children: children_of(module, parameters),
                }),
            };
        found.into_iter().map(complete).collect()
    }

    /// Checks that the second module of a pair has as many inputs as the first module has outputs. A rule that names
    /// its children is not checked, because between the two modules there may be a module without parameters that
    /// changes the size.
    fn check_sizes(&self, module: &str, pair: [Linear<'_>; 2], parameters: &[Parameter<'_>]) -> Result<(), PlanError> {
        let [first, second] = pair.map(|(_, at)| &parameters[at]);
        let is_local = |parameter: &Parameter<'_>| parameter.shape_origin == ShapeOrigin::LocalShard;
        let is_unknown = self.has_fsdp && (is_local(first) || is_local(second));
        if !self.children.is_empty() || is_unknown || first.shape[0] == second.shape[1] {
            return Ok(());
        }
        let [first_name, second_name] = pair.map(|(linear, _)| own_name(linear).to_owned());
        Err(PlanError::SizesOfPair {
            origin: self.origin(),
            module: display_module(module),
            first: first_name,
            outputs: first.shape[0],
            second: second_name,
            inputs: second.shape[1],
        })
    }
}

/// Returns each module that has a 2-d weight: the index of the weight in `parameters`, and the path of the module.
fn modules_with_2d_weight<'p>(parameters: &'p [Parameter<'_>]) -> impl Iterator<Item = (usize, &'p str)> {
    let module = |(at, parameter): (usize, &'p Parameter<'_>)| {
        let module = parameter.name.strip_suffix(".weight").filter(|_| parameter.shape.len() == 2)?;
        Some((at, module))
    };
    parameters.iter().enumerate().filter_map(module)
}

/// Returns the modules that contain a parameter, from the innermost to the root module.
fn ancestors(parameter: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(module_of(parameter)), |module| (!module.is_empty()).then(|| module_of(module)))
}

/// Returns the path of the parent module of `module`, if `module` has the name `relative` within that parent.
fn parent_of<'a>(module: &'a str, relative: &str) -> Option<&'a str> {
    let parent = module.strip_suffix(relative)?;
    if parent.is_empty() { Some(parent) } else { parent.strip_suffix('.') }
}

/// Returns the relative names of the modules with a 2-d weight below a module.
fn children_of(module: &str, parameters: &[Parameter<'_>]) -> Vec<String> {
    let prefix = if module.is_empty() { String::new() } else { format!("{module}.") };
    modules_with_2d_weight(parameters).filter_map(|(_, name)| Some(name.strip_prefix(&prefix)?.to_owned())).collect()
}

fn own_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

fn display_module(module: &str) -> String {
    if module.is_empty() { String::from("the root module") } else { module.to_owned() }
}

/// Sorts the children of an `nn.Sequential` by number. Returns false, and sorts nothing, if a name is not a number.
fn sort_by_number(linears: &mut [Linear<'_>]) -> bool {
    let number = |(linear, _): &Linear<'_>| own_name(linear).parse::<u64>();
    let are_numbers = linears.iter().all(|linear| number(linear).is_ok());
    if are_numbers {
        linears.sort_by_key(|linear| number(linear).unwrap_or(u64::MAX));
    }
    are_numbers
}
