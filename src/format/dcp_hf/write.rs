//! Lays out the files of DCP's Hugging Face storage for a target mesh: one safetensors file for each rank that writes a
//! box.
//!
//! If several ranks have the same box of a tensor, one of these ranks writes the box. dtshard chooses the same rank as
//! PyTorch (`dedup_save_plans`). Boxes are sorted by the lowest rank that has the box. Each box is then assigned to the
//! rank, among the ranks that have the box, to which the fewest bytes are assigned so far; if there are several such
//! ranks, to the lowest. If an uneven split leaves several ranks with an empty box, a single empty box is written, as
//! in PyTorch. Within a file, data is in the order in which the reference writer of safetensors sorts tensors.
//!
//! A reader treats a gap in the shard numbers of file names as a lost file. So shard numbers count only the ranks that
//! write a file.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Map, json};
use smallvec::SmallVec;

use crate::catalog::path::{self, Path};
use crate::catalog::{
    Catalog, Chunk, Dtype, FileLocation, Fqn, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value,
};
use crate::error::{Error, Result};
use crate::format::distinct_names;
use crate::format::safetensors::sharding::{SHARDING_INFO, ShardName};
use crate::format::safetensors::{DCP_VERSION_KEY, FORMAT_KEY, WrittenTensor, write_header};
use crate::format::traits::Layouts;
use crate::layout::{Rank, Region, Tile};
use crate::storage::FileId;

/// The value of `DCP_VERSION` in the files. PyTorch writes this version, and does not check it when reading.
const DCP_VERSION: &str = "1.0";

/// The dtype tags of safetensors, in the order in which the reference writer sorts tensors.
const TAGS: [&str; 19] = [
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E5M2FNUZ",
    "F8_E4M3FNUZ",
    "F8_E8M0",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "F4",
];

/// A box of a tensor, and the ranks that have it.
struct ShardPart {
    tensor: usize,
    region: Region,
    ranks: SmallVec<[Rank; 4]>,
}

/// Lays out the tensors of `state`. For each tensor, `layouts` returns the tiles of the ranks. Objects are not written,
/// because the format cannot store objects.
///
/// # Errors
/// `Unsupported` if two paths have the same dotted name, a rank has more than one box of a tensor, or the format has
/// no tag for a dtype; the errors of `layouts`.
pub fn reserve(source: &Catalog, state: &Value, layouts: &mut dyn Layouts) -> Result<Reservation> {
    let mut paths: Vec<(Path, TensorId)> = Vec::new();
    path::tensors(state, &Path::default(), &mut |path, id| paths.push((path.clone(), id)));
    let tensors: Vec<(Fqn, TensorId)> = paths.iter().map(|(path, id)| (path.fqn(), *id)).collect();
    distinct_names(tensors.iter().map(|(fqn, _)| fqn.as_str()), &["__metadata__", ""])?;
    let mut parts = Vec::new();
    for (tensor, (path, id)) in paths.iter().enumerate() {
        let (fqn, entry) = (&tensors[tensor].0, source.tensor(*id));
        for (tile, ranks) in layouts.shards(path, entry)? {
            parts.push(ShardPart { tensor, region: one_box(fqn, &tile, &entry.shape)?, ranks });
        }
    }
    let mut reservation = Reservation { left_out: path::object_names(state), ..Reservation::default() };
    let target = |(fqn, id): &(Fqn, TensorId)| {
        let entry = source.tensor(*id);
        Reserved::new(*id, TensorEntry::new(fqn.clone(), entry.dtype, entry.shape.clone()))
    };
    reservation.tensors = tensors.iter().map(target).collect();
    for (shard, (rank, parts)) in (1..).zip(by_writer(parts, &reservation.tensors)) {
        reserve_file(rank, shard, &parts, &mut reservation)?;
    }
    Ok(reservation)
}

/// Returns the only box of a tile. For an empty tile, returns the empty box that PyTorch records: in each dim without
/// elements, the offset is the size of the tensor in that dim.
fn one_box(fqn: &Fqn, tile: &Tile, shape: &[u64]) -> Result<Region> {
    if tile.is_empty() {
        return Ok(Region::new(tile.global_offsets(shape), tile.sizes()));
    }
    tile.as_region().ok_or_else(|| {
        Error::unsupported(
            format!(
                "{fqn}: a rank would have {} separate parts of the tensor, but a dcp-hf file stores one part per tensor",
                tile.regions().count()
            ),
            "write a DCP directory (options::to dcp), which stores every part",
        )
    })
}

/// Chooses the rank that writes each box. The result has the boxes of each rank, in the order of the state dict.
fn by_writer(mut parts: Vec<ShardPart>, tensors: &[Reserved]) -> BTreeMap<Rank, Vec<ShardPart>> {
    parts.sort_by_key(|part| (part.ranks.first().copied(), part.tensor));
    let mut bytes: BTreeMap<Rank, u64> = BTreeMap::new();
    let mut written: BTreeMap<Rank, Vec<ShardPart>> = BTreeMap::new();
    for part in parts {
        let load = |rank: &&Rank| (bytes.get(rank).copied().unwrap_or(0), **rank);
        let writer = *part.ranks.iter().min_by_key(load).expect("every part is on a rank");
        // PyTorch counts an empty part as one byte.
        *bytes.entry(writer).or_default() += len_bytes(&part, tensors).max(1);
        written.entry(writer).or_default().push(part);
    }
    written.values_mut().for_each(|parts| parts.sort_by_key(|part| part.tensor));
    written
}

fn len_bytes(part: &ShardPart, tensors: &[Reserved]) -> u64 {
    part.region.numel() * tensors[part.tensor].dtype().itemsize()
}

/// Lays out the file of one rank.
fn reserve_file(rank: Rank, shard: u32, parts: &[ShardPart], reservation: &mut Reservation) -> Result<()> {
    let name = ShardName { shard, file: 1, files: 1 }.to_string();
    let tensors = &mut reservation.tensors;
    let mut in_file: Vec<(&ShardPart, u64)> = parts.iter().map(|part| (part, 0)).collect();
    in_file.sort_by(|(left, _), (right, _)| {
        let key = |part: &ShardPart| order_of(tensors[part.tensor].dtype());
        let names = || tensors[left.tensor].entry.fqn.cmp(&tensors[right.tensor].entry.fqn);
        key(left).cmp(&key(right)).then_with(names)
    });
    let mut data_bytes = 0;
    for (part, begin) in &mut in_file {
        *begin = data_bytes;
        data_bytes += len_bytes(part, tensors);
    }
    let mut metadata = Map::new();
    metadata.insert(SHARDING_INFO.into(), json!(sharding_info(parts, tensors)));
    metadata.insert(DCP_VERSION_KEY.into(), json!(DCP_VERSION));
    metadata.insert(FORMAT_KEY.into(), json!("pt"));
    let written = in_file.iter().map(|(part, begin)| {
        let entry = &tensors[part.tensor].entry;
        WrittenTensor { name: entry.fqn.as_str(), dtype: entry.dtype, shape: &part.region.sizes, begin: *begin }
    });
    let header = write_header(name.as_ref(), &metadata, written, "write a DCP directory (options::to dcp)")?;
    let id = FileId(u32::try_from(reservation.files.len()).expect("fewer than 2^32 files"));
    let mut file = OutputFile::of_rank(rank, name);
    file.push_header(header);
    let data_start = file.push_payload(data_bytes);
    for (part, begin) in in_file {
        let tile = Tile::from_region(&part.region);
        let location = if tile.is_empty() {
            FileLocation::Empty
        } else {
            FileLocation::Bytes { file: id, offset: data_start + begin }
        };
        tensors[part.tensor].entry.chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
    }
    reservation.files.push(file);
    Ok(())
}

fn order_of(dtype: Dtype) -> usize {
    let tag = dtype.safetensors_tag();
    TAGS.iter().position(|known| Some(*known) == tag).unwrap_or(TAGS.len())
}

/// Returns the value of `DCP_SHARDING_INFO`: the offsets of the boxes in a file, as JSON in the format of `json.dumps`.
fn sharding_info(parts: &[ShardPart], tensors: &[Reserved]) -> String {
    let mut text = String::from("{");
    for (index, part) in parts.iter().enumerate() {
        let separator = if index > 0 { ", " } else { "" };
        let name = json!(tensors[part.tensor].entry.fqn.as_str());
        let offsets: Vec<String> = part.region.offsets.iter().map(u64::to_string).collect();
        write!(text, "{separator}{name}: {{\"saved_offsets\": [{}]}}", offsets.join(", ")).expect("text grows");
    }
    text.push('}');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dict;
    use crate::format::local::LocalLayout;
    use crate::format::safetensors::{parse_header, read_header};
    use crate::format::torch::RankLayout;
    use crate::layout::distinct_tiles::{HeldTile, MeshPlacement, SharedTensor, shards};
    use crate::layout::{DeviceMesh, Placement, TensorDim};
    use crate::storage::{Files, IoMode};

    /// The layout of the tensors in the fixture `dcp_hf`.
    struct OfFixture(DeviceMesh);

    impl Layouts for OfFixture {
        fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>> {
            let placement = match path.to_string().as_str() {
                "model.up.weight" => Placement::Shard(TensorDim(1)),
                "model.norm.weight" | "model.mask" => Placement::Replicate,
                _ if entry.shape.is_empty() => Placement::Replicate,
                _ => Placement::Shard(TensorDim(0)),
            };
            Ok(shards(&entry.shape, MeshPlacement { mesh: &self.0, shared: &SharedTensor::from(vec![placement]) })?)
        }

        fn rank_layout(&mut self, _: &Path, _: &TensorEntry) -> Result<RankLayout> {
            unreachable!("this format has boxes")
        }

        fn local_layout(&mut self, _: &Path, _: &TensorEntry) -> Result<LocalLayout> {
            unreachable!("this format has boxes")
        }
    }

    fn reserve_like_fixture() -> Reservation {
        let mut source = Catalog::empty();
        let mut entries = Vec::new();
        for (name, dtype, shape) in [
            ("model.embed_tokens.weight", Dtype::Bf16, &[10, 4][..]),
            ("model.up.weight", Dtype::F32, &[4, 7]),
            ("model.few.weight", Dtype::F32, &[2, 3]),
            ("model.ids", Dtype::I64, &[5]),
            ("model.norm.weight", Dtype::F32, &[4]),
            ("model.scale", Dtype::F64, &[]),
            ("model.steps", Dtype::I64, &[]),
            ("model.mask", Dtype::Bool, &[2, 3]),
        ] {
            let id = source.push_tensor(TensorEntry::new(name.into(), dtype, shape.into()));
            entries.push((Value::Str(name.into()), Value::Tensor(id)));
        }
        let state = Value::Dict(Dict { entries, ..Dict::default() });
        reserve(&source, &state, &mut OfFixture(DeviceMesh::parse("dp=3").unwrap())).unwrap()
    }

    #[test]
    fn headers_equal_those_of_pytorch() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dcp_hf/shards");
        let reservation = reserve_like_fixture();
        assert_eq!(reservation.files.len(), 3);
        for file in &reservation.files {
            let path = folder.join(&file.path);
            let mut files = Files::new(IoMode::Read);
            let id = files.add(&path).unwrap();
            let expected = read_header(&files, id).unwrap();
            assert_eq!(file.len, files.len_bytes(id), "{}", path.display());
            let found = parse_header(&path, &file.header_bytes[0].bytes[8..], file.len).unwrap();
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{}", path.display());
        }
    }

    #[test]
    fn empty_parts_have_no_data() {
        let reservation = reserve_like_fixture();
        let few = reservation.tensors.iter().find(|tensor| tensor.entry.fqn.as_str() == "model.few.weight").unwrap();
        assert_eq!([0, 1, 2].map(|index| few.file_offset(index).is_some()), [true, true, false]);
        assert!(few.entry.tilings().is_ok());
    }
}
