//! Device meshes: the grid of ranks that a layout refers to.
//!
//! A mesh is a row-major array of rank numbers, with an optional name for each dim. The ranks may be non-consecutive
//! and in any order: a slice of a larger mesh keeps the rank numbers of the larger mesh. Invariant: every dim is at
//! least 1, and every rank appears once.
//!
//! The rule is that of `torch/distributed/device_mesh.py`: the coordinate of a rank is the position of the rank's
//! number in the array.
//!
//! ```text
//!     dp=2,tp=3        tp=0 1 2
//!              dp=0       0 1 2        rank 5 sits at (1, 2)
//!              dp=1       3 4 5
//! ```

use std::{collections::HashSet, fmt};

use super::{AsTuple, Dims, LayoutError, MeshDim, Rank, numel, ravel, unravel};

/// The maximum number of ranks of a mesh that is built from a shape. The limit is about a hundred times the size of the
/// largest machine. A mistyped size of a mesh dim gives an error instead of using all memory.
const MAX_RANKS: u64 = 1 << 24;

/// A row-major array of ranks, with or without names for the mesh dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    shape: Dims,
    ranks: Vec<Rank>,
    names: Option<Vec<String>>,
    /// Every rank with its index in `ranks`, sorted by rank. The list is empty for a row-major mesh, in which rank and
    /// index are equal. The list is computed from `ranks`, so meshes with equal `ranks` also have equal lists.
    by_rank: Vec<(Rank, u32)>,
}

impl DeviceMesh {
    /// Makes a mesh from its shape, ranks and names.
    ///
    /// # Errors
    /// If the number of ranks differs from the number of cells, the number of names from the number of dims, a dim is
    /// 0, or a rank or name appears twice.
    pub fn new(shape: impl Into<Dims>, ranks: Vec<Rank>, names: Option<Vec<String>>) -> Result<Self, LayoutError> {
        let shape = shape.into();
        let in_words = || AsTuple(&shape).to_string();
        if shape.contains(&0) {
            return Err(LayoutError::EmptyMesh { shape: in_words() });
        }
        if numel(&shape) != Some(ranks.len() as u64) {
            return Err(LayoutError::RankCount { shape: in_words(), found: ranks.len() });
        }
        if let Some(names) = &names {
            if names.len() != shape.len() {
                return Err(LayoutError::NameCount { expected: shape.len(), found: names.len() });
            }
            let mut seen = HashSet::new();
            if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
                return Err(LayoutError::DuplicateName { name: name.clone() });
            }
        }
        let mut by_rank = Vec::new();
        if !is_row_major(&ranks) {
            by_rank = ranks.iter().copied().zip(0..).collect();
            by_rank.sort_unstable();
            if let Some(pair) = by_rank.windows(2).find(|pair| pair[0].0 == pair[1].0) {
                return Err(LayoutError::DuplicateRank { rank: pair[0].0 });
            }
        }
        Ok(Self { shape, ranks, names, by_rank })
    }

    /// Makes a mesh of the ranks `0..world_size` in row-major order, with these dim names and sizes.
    ///
    /// # Errors
    /// If a size is 0, a name appears twice, or the mesh has more than 2^24 ranks.
    pub fn row_major(named: &[(String, u64)]) -> Result<Self, LayoutError> {
        let shape: Dims = named.iter().map(|&(_, size)| size).collect();
        let world_size = numel(&shape).filter(|&n| n <= MAX_RANKS).and_then(|n| u32::try_from(n).ok());
        let Some(world_size) = world_size else {
            let shape = AsTuple(&shape).to_string();
            return Err(LayoutError::MeshTooLarge { shape, limit: MAX_RANKS });
        };
        let names = named.iter().map(|(name, _)| name.clone()).collect();
        Self::new(shape, (0..world_size).map(Rank).collect(), Some(names))
    }

    /// Parses a row-major mesh such as `dp=4,tp=2`, outermost dim first.
    ///
    /// # Errors
    /// If the text is not a list of `name=size`, and the errors of [`row_major`](Self::row_major).
    pub fn parse(spec: &str) -> Result<Self, LayoutError> {
        let error =
            |expected, found: &str| LayoutError::MeshSpec { spec: spec.to_owned(), expected, found: found.to_owned() };
        let mut named = Vec::new();
        for item in spec.split(',').map(str::trim) {
            let (name, size) = item.split_once('=').ok_or_else(|| error("name=size, as in dp=4,tp=2", item))?;
            let (name, size) = (name.trim(), size.trim());
            if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c)) {
                return Err(error("a dim name of letters, digits, `_`, `-` and `.`", name));
            }
            // `u64::from_str` alone would accept "+4".
            let digits = size.bytes().all(|byte| byte.is_ascii_digit());
            match size.parse() {
                Ok(1..) if !digits => return Err(error("a size in digits", size)),
                Ok(number @ 1..) => named.push((name.to_owned(), number)),
                Ok(0) | Err(_) => return Err(error("a size from 1 to 2^24", size)),
            }
        }
        Self::row_major(&named)
    }

    /// Returns the mesh of which all other meshes in the list are slices, or `None` if there is no such mesh. This
    /// search is needed because PyTorch up to 2.9 does not record the root mesh of a slice.
    pub fn root_of(meshes: &[Self]) -> Option<&Self> {
        let is_root = |root: &&Self| {
            let dims = |mesh: &Self| {
                mesh.names().is_some_and(|names| names.iter().all(|name| root.dim_by_name(name).is_some()))
            };
            let ranks: HashSet<Rank> = root.ranks().iter().copied().collect();
            let within = |mesh: &Self| mesh.ranks().iter().all(|rank| ranks.contains(rank));
            meshes.iter().all(|mesh| mesh == *root || dims(mesh) && within(mesh))
        };
        // Only the largest mesh can be the root.
        meshes.iter().max_by_key(|mesh| (mesh.world_size(), mesh.ndim())).filter(is_root)
    }

    /// Returns a mesh with the dim names and sizes of this mesh, and the given ranks in row-major order.
    ///
    /// # Errors
    /// The errors of [`DeviceMesh::new`].
    pub fn with_ranks(&self, ranks: Vec<Rank>) -> Result<Self, LayoutError> {
        Self::new(self.shape.as_slice(), ranks, self.names.clone())
    }

    /// Returns the size of each mesh dim.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of mesh dims.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Returns the ranks in row-major order of their coordinates.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Returns the name of each mesh dim, if the mesh has names.
    pub fn names(&self) -> Option<&[String]> {
        self.names.as_deref()
    }

    /// Returns whether another mesh has the dim names and sizes of this mesh. The ranks may differ.
    pub fn has_dims_of(&self, other: &Self) -> bool {
        (self.shape(), self.names()) == (other.shape(), other.names())
    }

    /// Returns the mesh dim with this name.
    pub fn dim_by_name(&self, name: &str) -> Option<MeshDim> {
        self.names()?.iter().position(|known| known == name).map(MeshDim)
    }

    /// Returns the number of ranks in this mesh. The job may have further ranks that are not in the mesh.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the minimum number of ranks of a job with this mesh: the highest rank plus 1.
    pub fn job_size(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.0.saturating_add(1)).max().unwrap_or(0)
    }

    /// Returns whether the ranks are `0..world_size` in order, so that the shape alone determines the ranks.
    pub fn ranks_are_row_major(&self) -> bool {
        is_row_major(&self.ranks)
    }

    /// Returns the coordinate of a rank, or `None` for a rank outside the mesh, which holds no part of a tensor.
    pub fn coordinate(&self, rank: Rank) -> Option<Dims> {
        let index = if self.by_rank.is_empty() {
            Some(rank.0).filter(|&index| (index as usize) < self.ranks.len())?
        } else {
            let at = self.by_rank.binary_search_by_key(&rank, |&(rank, _)| rank).ok()?;
            self.by_rank[at].1
        };
        Some(unravel(index.into(), &self.shape))
    }

    /// Returns the rank at a coordinate.
    ///
    /// # Panics
    /// If the coordinate is outside the mesh.
    #[expect(clippy::cast_possible_truncation, reason = "the index of an element of a Vec")]
    pub fn rank_at(&self, coordinate: &[u64]) -> Rank {
        let within = coordinate.len() == self.ndim() && coordinate.iter().zip(&self.shape).all(|(at, size)| at < size);
        assert!(within, "coordinate {coordinate:?} of a mesh of shape {:?}", self.shape);
        self.ranks[ravel(coordinate, &self.shape) as usize]
    }

    /// Returns every rank with its coordinate, in row-major order.
    pub fn coordinates(&self) -> impl ExactSizeIterator<Item = (Rank, Dims)> + '_ {
        (self.ranks.iter().enumerate()).map(|(index, &rank)| (rank, unravel(index as u64, &self.shape)))
    }
}

fn is_row_major(ranks: &[Rank]) -> bool {
    ranks.iter().zip(0..).all(|(rank, index)| rank.0 == index)
}

/// Displays the mesh as `dp=4,tp=2`, or as `(4, 2)` if it has no names.
impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(names) = &self.names else {
            return AsTuple(&self.shape).fmt(f);
        };
        for (i, (name, size)) in names.iter().zip(&self.shape).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{name}={size}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(numbers: &[u32]) -> Vec<Rank> {
        numbers.iter().copied().map(Rank).collect()
    }

    #[test]
    fn displayed_mesh_parses_to_the_same_mesh() {
        let mesh = DeviceMesh::parse(" dp=4, tp=2").unwrap();
        assert_eq!((mesh.shape(), mesh.world_size()), (&[4, 2][..], 8));
        assert_eq!(mesh.to_string(), "dp=4,tp=2");
        assert_eq!(mesh.dim_by_name("tp"), Some(MeshDim(1)));
        assert_eq!(mesh.dim_by_name("pp"), None);
        assert_eq!(DeviceMesh::parse(&mesh.to_string()), Ok(mesh));
    }

    #[test]
    fn invalid_mesh_text_is_an_error() {
        let junk = ["", ",", "dp", "dp=", "=2", "dp=0", "dp=-1", "dp=+2", "dp=2,", "dp=2,dp=2", "d p=2"];
        for spec in junk.into_iter().chain(["dp=2=3", "dp=16777217", "dp=4294967296,tp=4294967296,pp=9"]) {
            let error = DeviceMesh::parse(spec).expect_err(spec).to_string();
            assert!(error.contains("expected") && error.contains("found"), "{error}");
        }
        assert!(DeviceMesh::parse("dp=99999999999999999999").is_err());
        assert!(DeviceMesh::parse("dp=16777216").is_ok());
    }

    #[test]
    fn inconsistent_ranks_names_or_sizes_are_errors() {
        let names = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect());
        let new = |shape: &[u64], r: &[u32], names| DeviceMesh::new(shape, ranks(r), names);
        assert!(new(&[2, 2], &[0, 1, 2], None).is_err());
        assert!(new(&[0], &[], None).is_err());
        assert!(new(&[u64::MAX, u64::MAX], &[0], None).is_err());
        assert_eq!(new(&[2], &[3, 3], None), Err(LayoutError::DuplicateRank { rank: Rank(3) }));
        assert!(new(&[2, 1], &[0, 1], names(&["dp"])).is_err());
        assert!(new(&[2, 1], &[0, 1], names(&["dp", "dp"])).is_err());
        assert_eq!(new(&[2, 1], &[0, 1], None).unwrap().to_string(), "(2, 1)");
        assert_eq!(new(&[], &[5], None).unwrap().coordinate(Rank(5)), Some(Dims::new()));
    }

    #[test]
    fn slice_keeps_the_rank_numbers_of_the_mesh() {
        let mesh = DeviceMesh::new([2_u64, 2].as_slice(), ranks(&[7, 3, 1, 9]), None).unwrap();
        assert!(!mesh.ranks_are_row_major());
        for (rank, coordinate) in mesh.coordinates() {
            assert_eq!(mesh.coordinate(rank).unwrap(), coordinate);
            assert_eq!(mesh.rank_at(&coordinate), rank);
        }
        assert_eq!(mesh.coordinate(Rank(1)).unwrap().to_vec(), [1, 0]);
        assert_eq!(mesh.coordinate(Rank(0)), None);
        let plain = DeviceMesh::parse("dp=2,tp=3").unwrap();
        assert_eq!(plain.coordinate(Rank(5)).unwrap().to_vec(), [1, 2]);
        assert_eq!(plain.coordinate(Rank(6)), None);
    }

    #[test]
    fn root_is_the_mesh_that_all_others_are_slices_of() {
        let mesh = |spec: &str, ranks: &[u32]| {
            let mesh = DeviceMesh::parse(spec).unwrap();
            mesh.with_ranks(self::ranks(ranks)).unwrap()
        };
        let (whole, first, second) = (mesh("dp=2,tp=2", &[0, 1, 2, 3]), mesh("dp=2", &[0, 2]), mesh("dp=2", &[1, 3]));
        assert_eq!(DeviceMesh::root_of(&[first.clone(), whole.clone(), second.clone()]), Some(&whole));
        assert_eq!(DeviceMesh::root_of(std::slice::from_ref(&whole)), Some(&whole));
        assert_eq!(DeviceMesh::root_of(&[first, second]), None);
        assert_eq!(DeviceMesh::root_of(&[whole.clone(), mesh("ep=2", &[0, 1])]), None);
        assert_eq!(DeviceMesh::root_of(&[whole, mesh("dp=2", &[0, 4])]), None);
        assert_eq!(DeviceMesh::root_of(&[]), None);
    }
}
