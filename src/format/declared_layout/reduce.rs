//! Mesh dims along which ranks hold summands of plain tensors.
//!
//! A rank's own gradients, as backward leaves them where nothing reduced them yet, are summands along the data-parallel
//! dims of the job. Which tensors are meant: those of the subtree of gradients where there is one, else all tensors of
//! floats that are not optimizer state, random state or what trainers put beside a model. Integers are never summed: they
//! count something that is the same on all ranks, and are compared.

use crate::catalog::model::{self, gradients_root, is_beside_model, is_random_state, model_root};
use crate::catalog::optimizer::optimizer_state;
use crate::catalog::path::key_text;
use crate::catalog::{Dtype, Key, Path, Value};
use crate::error::{Error, Result};
use crate::layout::file::did_you_mean;
use crate::layout::partial::PartialReduction;
use crate::layout::{DeviceMesh, Placement, ReduceOp};
use crate::quantity::count;

/// `--reduce dp,cp=avg`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReduceRule {
    pub dims: Vec<String>,
    pub op: ReduceOp,
}

/// What is reduced, and what was.
#[derive(Debug)]
pub struct ReduceRules {
    /// One a mesh dim.
    ops: Vec<Option<ReduceOp>>,
    /// `dp, cp (avg)`
    said: String,
    reach: ReduceScope,
    reduced: usize,
    /// Those of them that are sharded on one of the dims.
    sharded: usize,
}

/// Which tensors are meant.
#[derive(Debug)]
enum ReduceScope {
    Gradients(Path),
    /// Where a model is that stands beside other things; empty where it is at the top.
    Floats {
        siblings: usize,
        beside: Vec<Key>,
    },
}

impl ReduceRules {
    /// # Errors
    /// `Usage` for dims that the mesh does not have or that are named twice, `Layout` for ops that do not commute.
    pub fn new(reduce: &[ReduceRule], mesh: &DeviceMesh, state: &Value) -> Result<Self> {
        let mut ops: Vec<Option<ReduceOp>> = vec![None; mesh.ndim()];
        for (name, op) in reduce.iter().flat_map(|reduce| reduce.dims.iter().map(|name| (name, reduce.op))) {
            let Some(dim) = mesh.dim_by_name(name) else { return Err(unknown_dim(name, mesh)) };
            if let Some(known) = ops[dim.0].replace(op) {
                return Err(Error::usage(
                    format!("options::reduce: {name} is named twice, with {known} and {op}"),
                    "say of each mesh dim once how it is reduced",
                ));
            }
        }
        let placements: Vec<Placement> =
            ops.iter().map(|op| op.map_or(Placement::Replicate, Placement::Partial)).collect();
        PartialReduction::new(mesh.shape(), &placements)?;
        let said: Vec<String> =
            reduce.iter().map(|reduce| format!("{} over {}", reduce.op, reduce.dims.join(", "))).collect();
        let root = model_root(state);
        let reach = match gradients_root(state, &root) {
            Some(gradients) => ReduceScope::Gradients(gradients),
            None => ReduceScope::floats(state, &root),
        };
        Ok(Self { ops, said: said.join("; "), reach, reduced: 0, sharded: 0 })
    }

    /// Make placements of a tensor Partial where it is reduced.
    pub fn apply(&mut self, path: &Path, dtype: Dtype, placements: &mut [Placement]) {
        if !dtype.is_float() || !self.reach.covers(path) {
            return;
        }
        let mut reduced = false;
        let mut sharded = false;
        for (op, placement) in self.ops.iter().zip(placements) {
            match (op, &placement) {
                (Some(op), Placement::Replicate) => {
                    *placement = Placement::Partial(*op);
                    reduced = true;
                }
                (Some(_), Placement::Shard(_) | Placement::StridedShard { .. }) => sharded = true,
                _ => {}
            }
        }
        self.reduced += usize::from(reduced);
        self.sharded += usize::from(sharded);
    }

    /// What to tell.
    ///
    /// # Errors
    /// `Usage` where there was nothing to reduce.
    pub fn finish(&self) -> Result<Option<String>> {
        if self.ops.iter().all(Option::is_none) {
            return Ok(None);
        }
        let what = match &self.reach {
            ReduceScope::Gradients(root) => format!("below {root}"),
            ReduceScope::Floats { .. } => String::from("of floats (optimizer and random state apart)"),
        };
        if self.reduced == 0 {
            return Err(Error::usage(
                format!("options::reduce: no plain tensor {what} is whole on these mesh dims"),
                "DTensors say themselves what is Partial, and a dim that shards has nothing to sum; leave it out",
            ));
        }
        let sharded = match self.sharded {
            0 => String::new(),
            number => format!("; {number} sharded on one of these dims, and no summands there"),
        };
        Ok(Some(format!("{} {what} are summands: {}{sharded}", count(self.reduced, "plain tensor"), self.said)))
    }
}

impl ReduceScope {
    fn floats(state: &Value, root: &Path) -> Self {
        let siblings = root.0.len().saturating_sub(1);
        let dict = Path(root.0[..siblings].to_vec()).find(state).and_then(Value::as_dict);
        let entries = dict.into_iter().flat_map(|dict| &dict.entries).map(|(key, value)| (key_text(key), value));
        let beside =
            entries.filter(|(name, value)| is_beside_model(name, value)).map(|(name, _)| Key::Name(name)).collect();
        Self::Floats { siblings, beside }
    }

    fn covers(&self, path: &Path) -> bool {
        match self {
            Self::Gradients(root) => path.0.starts_with(&root.0),
            Self::Floats { siblings, beside } => {
                let sibling = path.0.get(*siblings);
                optimizer_state(path).is_none()
                    && !is_random_state(path.fqn().as_str())
                    && sibling.is_none_or(|key| !beside.contains(key) || is_gradients(key))
            }
        }
    }
}

/// Gradients of another nesting than that beside a model.
fn is_gradients(key: &Key) -> bool {
    matches!(key, Key::Name(name) if model::GRADIENTS.contains(&name.as_ref()))
}

fn unknown_dim(name: &str, mesh: &DeviceMesh) -> Error {
    let hint = match mesh.names() {
        None => String::from("the dims of its mesh have no names: say them with options::src_mesh"),
        Some(names) => did_you_mean(name, &names.iter().map(String::as_str).collect::<Vec<_>>()),
    };
    Error::usage(format!("options::reduce: the mesh {mesh} has no dim `{name}`"), hint)
}
