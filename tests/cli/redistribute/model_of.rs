//! A reference model of redistribution, which computes the elements that each rank should have.

#![expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "elements are small")]

/// A placement of the reference model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelPlacement {
    Whole,
    Shard(usize),
    Strided(usize, usize),
    Partial(&'static str),
}

impl ModelPlacement {
    fn op(self) -> Option<&'static str> {
        if let Self::Partial(op) = self { Some(op) } else { None }
    }

    fn is_shard(self) -> bool {
        matches!(self, Self::Shard(_) | Self::Strided(..))
    }
}

impl std::fmt::Display for ModelPlacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole => f.write_str("R"),
            Self::Shard(dim) => write!(f, "S({dim})"),
            Self::Strided(dim, factor) => write!(f, "_S({dim},{factor})"),
            Self::Partial(op) => write!(f, "P({op})"),
        }
    }
}

pub fn text(list: &[ModelPlacement]) -> String {
    list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Returns part number `r` (from 0) of the `k` parts into which `torch.chunk` cuts a list.
fn chunk(list: &[usize], k: usize, r: usize) -> Vec<usize> {
    let size = list.len().div_ceil(k).max(1);
    list.chunks(size).nth(r).unwrap_or_default().to_vec()
}

/// Returns, for each tensor dim, the indices that the rank at the mesh coordinate `at` holds.
pub fn indices_of(shape: &[usize], mesh: &[usize], list: &[ModelPlacement], at: &[usize]) -> Vec<Vec<usize>> {
    let mut dims: Vec<Vec<usize>> = shape.iter().map(|&n| (0..n).collect()).collect();
    for (mesh_dim, place) in list.iter().enumerate() {
        let (k, r) = (mesh[mesh_dim], at[mesh_dim]);
        match *place {
            ModelPlacement::Shard(dim) => dims[dim] = chunk(&dims[dim], k, r),
            ModelPlacement::Strided(dim, factor) => {
                let blocks = (0..factor).flat_map(|block| chunk(&chunk(&dims[dim], factor, block), k, r));
                dims[dim] = blocks.collect();
            }
            ModelPlacement::Whole | ModelPlacement::Partial(_) => {}
        }
    }
    dims
}

pub fn elements(dims: &[Vec<usize>]) -> Vec<Vec<usize>> {
    dims.iter().fold(vec![vec![]], |all, dim| {
        all.iter().flat_map(|index| dim.iter().map(move |at| [&index[..], &[*at]].concat())).collect()
    })
}

pub fn coordinates(mesh: &[usize]) -> Vec<Vec<usize>> {
    elements(&mesh.iter().map(|&size| (0..size).collect()).collect::<Vec<_>>())
}

/// Returns the reason why a redistribution is undefined, or `None` if it is defined. `same` is true if source and
/// target have the same mesh.
pub fn refusal_reason(from: &[ModelPlacement], to: &[ModelPlacement], same: bool) -> Option<&'static str> {
    let ops = |list: &[ModelPlacement]| list.iter().filter_map(|place| place.op()).collect::<Vec<_>>();
    let mixed = |ops: &[&str]| ops.iter().any(|op| *op != ops[0]);
    if mixed(&ops(from)) || mixed(&ops(to)) {
        return Some("do not commute");
    }
    let differ =
        |from: &ModelPlacement, to: &ModelPlacement| from.op().is_some() && to.op().is_some() && from.op() != to.op();
    let is_refused = if same {
        from.iter().zip(to).any(|(from, to)| differ(from, to))
    } else {
        from.iter().any(|from| to.iter().any(|to| differ(from, to)))
    };
    is_refused.then_some("cannot be converted to")
}

/// One tensor of a conversion, with its placements in source and target.
#[derive(Clone, Debug)]
pub struct Case {
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub from: Vec<ModelPlacement>,
    pub to: Vec<ModelPlacement>,
    pub seed: u64,
}

impl Case {
    /// Returns the value that the rank at coordinate `at` stores for the element at `index`, rounded to the dtype.
    pub fn stored(&self, index: &[usize], at: &[usize]) -> f64 {
        let partial_index = self.from.iter().zip(at).map(|(place, at)| if place.op().is_some() { *at + 1 } else { 0 });
        let mut hash = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x51_7CC1;
        for number in partial_index.chain(index.iter().map(|at| at + 7)) {
            hash = (hash ^ number as u64).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            hash ^= hash >> 29;
        }
        let small = f64::from(u32::try_from(hash >> 40).unwrap() % 2001) - 1000.0;
        match self.dtype {
            "f32" => f64::from((small / 7.0) as f32),
            "bf16" => f64::from(f32::from_bits(((small / 7.0) as f32).to_bits() & 0xffff_0000)),
            // The factor 36 is divisible by the sizes of the meshes.
            _ => small * 36.0,
        }
    }

    pub fn bytes(&self, value: f64) -> Vec<u8> {
        match self.dtype {
            "f32" => (value as f32).to_le_bytes().to_vec(),
            "bf16" => {
                let bits = (value as f32).to_bits();
                let even = bits + 0x7fff + ((bits >> 16) & 1);
                even.to_le_bytes()[2..].to_vec()
            }
            _ => (value as i64).to_le_bytes().to_vec(),
        }
    }

    /// Rounds an intermediate result as the library does: for bf16 to f32, and not at all for other dtypes.
    fn round(&self, value: f64) -> f64 {
        if self.dtype == "bf16" { f64::from(value as f32) } else { value }
    }

    /// Returns the bytes that the rank at coordinate `at` of the source stores.
    pub fn source(&self, mesh: &[usize], at: &[usize]) -> Vec<u8> {
        let elements = elements(&indices_of(&self.shape, mesh, &self.from, at));
        elements.iter().flat_map(|index| self.bytes(self.stored(index, at))).collect()
    }

    /// Returns the bytes that the rank at coordinate `at` of the target should have. `same` is true if source and
    /// target have the same mesh.
    pub fn target(&self, meshes: (&[usize], &[usize]), same: bool, at: &[usize]) -> Vec<u8> {
        let (mesh, target) = meshes;
        let op = self.from.iter().find_map(|place| place.op());
        let (mut divisor, mut stay) = (1, Vec::new());
        // The partial values to reduce are those of all coordinates on the Partial dims. On dims that keep their
        // partial values, only the own coordinate counts.
        let is_partial = |dim: usize| self.from[dim].op().is_some();
        let mut kept: Vec<Option<usize>> = (0..mesh.len()).map(|dim| (!is_partial(dim)).then_some(0)).collect();
        for (dim, place) in self.to.iter().enumerate() {
            let from = if same { self.from[dim] } else { ModelPlacement::Whole };
            match (place.op(), from) {
                (None, _) => {}
                (Some(to), ModelPlacement::Partial(from)) if from == to => kept[dim] = Some(at[dim]),
                (Some("sum"), from) if from.is_shard() => stay.push(dim),
                (Some("sum"), _) => divisor *= target[dim],
                (Some(_), _) => {}
            }
        }
        for (dim, place) in self.from.iter().enumerate() {
            if place.op() == Some("avg") && kept[dim].is_none() {
                divisor *= mesh[dim];
            }
        }
        let ranges: Vec<Vec<usize>> = kept
            .iter()
            .zip(mesh)
            .map(|(kept, size)| kept.map_or_else(|| (0..*size).collect(), |at| vec![at]))
            .collect();
        let partial_values = elements(&ranges);
        // The indices that the ranks with the same coordinates on the mesh dims that change from Shard to Partial hold
        // in the source.
        let alike: Vec<Vec<Vec<usize>>> = (coordinates(mesh).iter())
            .filter(|other| stay.iter().all(|dim| other[*dim] == at[*dim]))
            .map(|other| indices_of(&self.shape, mesh, &self.from, other))
            .collect();
        let holds =
            |dims: &Vec<Vec<usize>>, index: &[usize]| index.iter().zip(dims).all(|(at, held)| held.contains(at));
        let inside = |index: &[usize]| stay.is_empty() || alike.iter().any(|dims| holds(dims, index));
        let value = |index: &Vec<usize>| {
            if !inside(index) {
                return self.bytes(0.0);
            }
            let mut found = partial_values.iter().map(|at| self.stored(index, at));
            let first = found.next().unwrap();
            let reduced = found.fold(first, |sum, other| match op {
                Some("max") => {
                    if other > sum {
                        other
                    } else {
                        sum
                    }
                }
                Some("min") => {
                    if other < sum {
                        other
                    } else {
                        sum
                    }
                }
                Some("product") => self.round(sum * other),
                _ => self.round(sum + other),
            });
            self.bytes(self.round(reduced / divisor as f64))
        };
        elements(&indices_of(&self.shape, target, &self.to, at)).iter().flat_map(value).collect()
    }
}
