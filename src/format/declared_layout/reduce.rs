//! Applies `options::reduce`, which names the mesh dims along which ranks hold partial values of plain tensors.
//!
//! The gradients of a rank, as backward leaves them before any reduction, are partial values along the data-parallel
//! dims of the job. If the state dict has a subtree of gradients, `options::reduce` applies to the tensors in this
//! subtree. Otherwise the option applies to all floating-point tensors that are not optimizer state, random state or
//! trainer state next to a model. Integer tensors are never reduced: they are counters, and all ranks must have the
//! same value.

use crate::catalog::optimizer::optimizer_state;
use crate::catalog::path::key_text;
use crate::catalog::state_dict::{self, gradients_root, is_beside_model, is_random_state, model_root};
use crate::catalog::{Dtype, Key, Path, Value};
use crate::document::did_you_mean;
use crate::error::{Error, Result};
use crate::layout::partial::PartialReduction;
use crate::layout::{DeviceMesh, Placement, ReduceOp};
use crate::quantity::count;

/// One value of `options::reduce`, such as `dp,cp=avg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReduceRule {
    pub dims: Vec<String>,
    pub op: ReduceOp,
}

/// The reduce operation of each mesh dim, and counts of the tensors to which these operations apply.
#[derive(Debug)]
pub struct ReduceRules {
    /// For each mesh dim, the reduce operation along it; `None` if values are not reduced along the dim.
    ops: Vec<Option<ReduceOp>>,
    /// The reductions as text, such as `sum over dp; avg over cp`.
    description: String,
    scope: ReducedTensors,
    reduced: usize,
    /// The number of tensors in `scope` that are sharded along one of the dims of `options::reduce`. Some of them also
    /// hold partial values along another of these dims.
    sharded_on_reduced_dim: usize,
}

/// The tensors that `options::reduce` applies to.
#[derive(Debug)]
enum ReducedTensors {
    Gradients(Path),
    /// All floating-point tensors except optimizer state, random state and trainer state. `siblings` is the index, in
    /// the path of a tensor, of the key that names the model (0 if the tensors of the model are at the top level).
    /// `beside` lists the keys at this index that hold optimizer state or trainer state.
    Floats {
        siblings: usize,
        beside: Vec<Key>,
    },
}

impl ReduceRules {
    /// Resolves the dims of `options::reduce` on the mesh.
    ///
    /// # Errors
    ///
    /// `Usage` for a dim that the mesh does not have or that is named twice, `Layout` for operations that do not
    /// commute.
    pub fn new(reduce: &[ReduceRule], mesh: &DeviceMesh, state: &Value) -> Result<Self> {
        let mut ops: Vec<Option<ReduceOp>> = vec![None; mesh.ndim()];
        for (name, op) in reduce.iter().flat_map(|reduce| reduce.dims.iter().map(|name| (name, reduce.op))) {
            let Some(dim) = mesh.dim_by_name(name) else { return Err(unknown_dim(name, mesh)) };
            if let Some(known) = ops[dim.0].replace(op) {
                return Err(Error::usage(
                    format!("options::reduce: mesh dim {name} is given twice, with {known} and {op}"),
                    "give one operation per mesh dim",
                ));
            }
        }
        let placements: Vec<Placement> =
            ops.iter().map(|op| op.map_or(Placement::Replicate, Placement::Partial)).collect();
        PartialReduction::new(mesh.shape(), &placements)?;
        let described: Vec<String> =
            reduce.iter().map(|reduce| format!("{} over {}", reduce.op, reduce.dims.join(", "))).collect();
        let root = model_root(state);
        let scope = match gradients_root(state, &root) {
            Some(gradients) => ReducedTensors::Gradients(gradients),
            None => ReducedTensors::floats(state, &root),
        };
        Ok(Self { ops, description: described.join("; "), scope, reduced: 0, sharded_on_reduced_dim: 0 })
    }

    /// In the placements of one tensor, replaces Replicate by Partial on each mesh dim that `options::reduce` names.
    /// Does nothing if the tensor is not floating-point, or is not one of the tensors in `scope`.
    pub fn apply(&mut self, path: &Path, dtype: Dtype, placements: &mut [Placement]) {
        if !dtype.is_float() || !self.scope.contains(path) {
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
        self.sharded_on_reduced_dim += usize::from(sharded);
    }

    /// Returns a note about the tensors that hold partial values; `None` if `options::reduce` names no mesh dim.
    ///
    /// # Errors
    /// `Usage` if `options::reduce` names mesh dims, but no tensor holds partial values.
    pub fn finish(&self) -> Result<Option<String>> {
        if self.ops.iter().all(Option::is_none) {
            return Ok(None);
        }
        let (kind, scope, others, exception) = match &self.scope {
            ReducedTensors::Gradients(root) => ("plain tensor", format!(" below {root}"), "", ""),
            ReducedTensors::Floats { .. } => (
                "plain float tensor",
                String::new(),
                ", and does not change optimizer, RNG and trainer state",
                " (optimizer, RNG and trainer state does not count)",
            ),
        };
        if self.reduced == 0 {
            return Err(Error::usage(
                format!(
                    "options::reduce has no effect, because SRC has no {kind}{scope} that is replicated on the mesh dims \
                     of options::reduce{exception}"
                ),
                "remove options::reduce: DTensors record their own Partial placements, and on a mesh dim that shards a tensor there is nothing \
                 to reduce",
            ));
        }
        let sharded = match self.sharded_on_reduced_dim {
            0 => String::new(),
            1 => String::from("; 1 tensor is sharded on one of these dims, so it has no partial values on that dim"),
            number => {
                format!(
                    "; {number} tensors are sharded on one of these dims, so they have no partial values on that dim"
                )
            }
        };
        Ok(Some(format!(
            "options::reduce treats {}{scope} as partial values ({}){others}{sharded}",
            count(self.reduced, kind),
            self.description
        )))
    }
}

impl ReducedTensors {
    fn floats(state: &Value, root: &Path) -> Self {
        let siblings = root.0.len().saturating_sub(1);
        let dict = Path(root.0[..siblings].to_vec()).find(state).and_then(Value::as_dict);
        let entries = dict.into_iter().flat_map(|dict| &dict.entries).map(|(key, value)| (key_text(key), value));
        let beside =
            entries.filter(|(name, value)| is_beside_model(name, value)).map(|(name, _)| Key::Name(name)).collect();
        Self::Floats { siblings, beside }
    }

    fn contains(&self, path: &Path) -> bool {
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

/// Returns whether a key is one of the names under which jobs save gradients.
fn is_gradients(key: &Key) -> bool {
    matches!(key, Key::Name(name) if state_dict::GRADIENTS.contains(&name.as_ref()))
}

fn unknown_dim(name: &str, mesh: &DeviceMesh) -> Error {
    let hint = match mesh.names() {
        None => String::from("name the mesh dims with options::src_mesh, because the mesh of SRC has no names"),
        Some(names) => did_you_mean(name, &names.iter().map(String::as_str).collect::<Vec<_>>()),
    };
    Error::usage(format!("options::reduce: the mesh {mesh} has no dim `{name}`"), hint)
}
