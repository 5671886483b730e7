//! A test checkpoint that is converted by one process, and also by an exchange of several processes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::{Means, Spec, lossy_element, term};
use crate::catalog::{OutputFile, PartialValues, Reserved, TensorId};
use crate::comm::{Communicator, Local};
use crate::exchange::{
    Exchange, FileOwners, FileVisibility, Load, ReductionMethod, ReplicaChoice, Rounds, Topology, agree,
};
use crate::exec::Silent;
use crate::exec::cast::DtypePair;
use crate::exec::copy::CastCount;
use crate::exec::tests::*;
use crate::layout::Region;
use crate::layout::partial::{PartialReduction, Share};
use crate::storage::{AnchoredPath, FileId};

/// A source checkpoint with one file for each rank that saved it, and the layout of the target files.
pub(crate) struct Case {
    pub(super) folder: tempfile::TempDir,
    pub(super) files: Files,
    pub(super) catalog: Catalog,
    pub(super) reservation: Reservation,
}

impl Case {
    pub(crate) fn new(specs: &[Spec], transpose: bool) -> Self {
        Self::from_terms(specs, transpose, &term)
    }

    /// Builds a case in which casts lose the values of some elements.
    pub(crate) fn lossy(specs: &[Spec], transpose: bool) -> Self {
        Self::from_elements(specs, transpose, &lossy_element)
    }

    /// Builds a case in which `term` returns each element of each partial value. The arguments of `term` are a dtype,
    /// the index of the element, and the index of the partial value.
    pub(super) fn from_terms(specs: &[Spec], transpose: bool, term: &dyn Fn(Dtype, u64, u64) -> Vec<u8>) -> Self {
        let plain = |dtype: Dtype, index| element(index, dtype.itemsize());
        Self::from_elements(specs, transpose, &|dtype, index, partial| {
            partial.map_or_else(|| plain(dtype, index), |partial| term(dtype, index, partial))
        })
    }

    /// Builds a case in which `value` returns each element. The arguments of `value` are a dtype, the index of the
    /// element, and the index of the partial value, if there are partial values.
    fn from_elements(specs: &[Spec], transpose: bool, value: &dyn Fn(Dtype, u64, Option<u64>) -> Vec<u8>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut stored: Vec<Vec<u8>> = Vec::new();
        let (mut entries, mut targets) = (Vec::new(), Vec::new());
        let mut outputs: Vec<OutputFile> = Vec::new();
        for (number, (shape, (from_dtype, to_dtype), from, to, partial_values)) in specs.iter().enumerate() {
            let id = TensorId(u32::try_from(number).unwrap());
            let mut entry = TensorEntry::new(format!("t{number}").into(), *from_dtype, shape.as_slice().into());
            let mut of_chunk = Vec::new();
            let count = partial_values.map_or(1, |(count, _)| count);
            for partial in 0..count {
                let path = folder.path().join("stored");
                let value = |index: u64| value(*from_dtype, index, partial_values.map(|_| partial));
                let (_, one) = store_values(shape, *from_dtype, from, transpose, IoMode::Read, &path, &value);
                let bytes = fs::read(&path).unwrap();
                for (rank, mut chunk) in one.chunks.iter().enumerate() {
                    // Each partial value is stored by its own ranks.
                    let rank = rank * usize::try_from(count).unwrap() + usize::try_from(partial).unwrap();
                    stored.resize(stored.len().max(rank + 1), vec![0xEE; 7]);
                    if let FileLocation::Bytes { file, offset } = &mut chunk.location {
                        let start = usize::try_from(*offset).unwrap();
                        let len = usize::try_from(chunk.tile.numel() * from_dtype.itemsize()).unwrap();
                        *file = FileId(u32::try_from(rank).unwrap());
                        *offset = stored[rank].len() as u64;
                        stored[rank].extend_from_slice(&bytes[start..start + len]);
                    }
                    entry.chunks.push(chunk);
                    of_chunk.push(partial);
                }
            }
            if let Some((count, op)) = partial_values {
                let reduction = PartialReduction::new(&[*count], &[Placement::Partial(*op)]).unwrap().unwrap();
                entry.partial_values = Some(Box::new(PartialValues { reduction, by_chunk: of_chunk }));
            }
            let mut target = TensorEntry::new(entry.fqn.clone(), *to_dtype, shape.as_slice().into());
            for (rank, tile) in to.tiles(shape).into_iter().enumerate() {
                if outputs.len() <= rank {
                    outputs.push(OutputFile::new(format!("out{rank}")));
                }
                let file = &mut outputs[rank];
                file.push_header(vec![9; 3 + number]);
                let mut location = FileLocation::Empty;
                if !tile.is_empty() {
                    let offset = file.push_payload(tile.numel() * to_dtype.itemsize());
                    location = FileLocation::Bytes { file: FileId(u32::try_from(rank).unwrap()), offset };
                }
                target.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
            }
            targets.push(Reserved::new(id, target));
            entries.push(entry);
        }
        let mut files = Files::new(IoMode::Read);
        for (rank, bytes) in stored.iter().enumerate() {
            let path = folder.path().join(format!("in{rank}"));
            fs::write(&path, bytes).unwrap();
            files.add(path).unwrap();
        }
        let reservation = Reservation { files: outputs, tensors: targets, ..Reservation::default() };
        Self { folder, files, catalog: Catalog { tensors: entries, ..Catalog::empty() }, reservation }
    }

    /// Makes target chunks contain different shares of the partial values: the sum in only a part of the tensor (0
    /// elsewhere), one single partial value, or the whole sum. Float tensors without partial values are divided by 4.
    pub(crate) fn with_shares(mut self) -> Self {
        for tensor in &mut self.reservation.tensors {
            let source = &self.catalog.tensors[tensor.source.0 as usize];
            let shares = |of_chunk: &dyn Fn(usize) -> Share| {
                (0..tensor.entry.chunks.len()).map(|chunk| Arc::new(of_chunk(chunk))).collect()
            };
            tensor.shares = match &source.partial_values {
                Some(partial_values) => {
                    let sizes: Dims = source.shape.iter().map(|size| size.div_ceil(2)).collect();
                    let part = Tile::from_region(&Region::new(smallvec::smallvec![0; sizes.len()], sizes));
                    let whole = partial_values.reduction.full_reduction();
                    let own = |chunk: usize| chunk as u64 % partial_values.reduction.count();
                    shares(&|chunk| match chunk % 3 {
                        0 => Share { within: Some(part.clone()), ..whole.clone() },
                        1 => Share { partial_values: vec![own(chunk)], divisor: 1, within: None },
                        _ => whole.clone(),
                    })
                }
                None if source.dtype.is_float() => {
                    shares(&|_| Share { partial_values: vec![0], divisor: 4, within: None })
                }
                None => continue,
            };
        }
        self
    }

    fn input(&self) -> Input<'_> {
        Input { files: &self.files, catalog: &self.catalog, resolve: &resolve }
    }

    pub(crate) fn convert_alone(&self) -> ConvertedOutput {
        let stats = self.try_convert_alone().unwrap();
        self.read_output(&self.folder.path().join("alone"), &[stats])
    }

    pub(super) fn try_convert_alone(&self) -> Result<Stats> {
        let folder = self.folder.path().join("alone");
        fs::create_dir(&folder).unwrap();
        copy(self.input(), &self.reservation, &folder, &options(), &Silent, &Stop::default())
    }

    pub(crate) fn exchange<M: Means>(
        &self,
        means: &M,
        topology: &Topology,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> (ConvertedOutput, Vec<Load>) {
        let loads = self.try_exchange(means, topology, todos, bucket_bytes);
        let (loads, stats): (Vec<Vec<Load>>, Vec<Stats>) = loads.into_iter().map(Result::unwrap).unzip();
        assert!(loads.iter().all(|other| *other == loads[0]), "all ranks make the same plan");
        (self.read_output(&self.folder.path().join("exchanged"), &stats), loads[0].clone())
    }

    /// Runs the exchange in all processes. Returns for each process an error, or the loads of all processes that a dry
    /// run computes, and the statistics of the process.
    pub(super) fn try_exchange<M: Means>(
        &self,
        means: &M,
        topology: &Topology,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> Vec<Result<(Vec<Load>, Stats)>> {
        let folder = self.folder.path().join("exchanged");
        fs::create_dir(&folder).unwrap();
        let ranks = Local::fleet(topology.size());
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .zip(todos)
                .map(|(rank, todo)| {
                    let folder = &folder;
                    scope.spawn(move || {
                        let seat = means.seat(rank);
                        let rank = M::rank(&seat);
                        let agreed = agree(rank, &self.reservation.files, todo).unwrap();
                        assert_eq!(agreed, todos);
                        let owners = FileOwners::new(&self.reservation.files, &agreed);
                        let files = self.files.clone();
                        let input = Input { files: &files, ..self.input() };
                        let (reservation, owners) = (&self.reservation, &owners);
                        let exchange = Exchange { input, reservation, parties: topology, owners, bucket_bytes };
                        let folder = &AnchoredPath::new(folder);
                        let path = folder.join(format!("{}.journal", rank.rank()));
                        let log = Log::new(&reservation.files, todo, path, false, AtEnd::Nothing);
                        let shuffle = M::shuffle(&seat);
                        let (log, options, stop) = (&log, &options(), &Stop::default());
                        let writing = WriteContext { reservation, folder, log, options, reporter: &Silent, stop };
                        let stats = exchange.run(rank, shuffle, writing)?;
                        // If a rank left before the other ranks have finished, the other ranks would fail.
                        rank.barrier().unwrap();
                        if let Some(counted) = M::counted(&seat) {
                            let load = exchange.loads()[rank.rank() as usize];
                            assert_eq!(
                                counted,
                                (load.sent(), load.received()),
                                "the bytes on the network equal the plan"
                            );
                        }
                        let loads = exchange.dry_run(&Stop::default())?.1;
                        M::leave(seat);
                        Ok((loads, stats))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Returns the topology of `ranks` processes, with two processes on each node, and the bytes that each process
    /// writes ([`split_output`]). `seed` selects random file visibility; without it, all processes see all files.
    pub(crate) fn topology(&self, ranks: u32, cuts: &[u64], seed: Option<u64>) -> (Topology, Vec<Extents>) {
        let visibility =
            seed.map_or(FileVisibility::Shared, |seed| random_visibility(self.files.ids().count(), ranks, seed));
        let topology = Topology {
            visibility,
            nodes: (0..ranks).map(|rank| rank / 2).collect(),
            replica_choice: ReplicaChoice::Any,
            reducing: ReductionMethod::InRankOrder,
        };
        (topology, split_output(&self.reservation, cuts, ranks))
    }

    /// Deletes the output of an exchange, so that another exchange can run.
    pub(super) fn remove_exchanged(&self) {
        fs::remove_dir_all(self.folder.path().join("exchanged")).unwrap();
    }

    /// Reads the output of a folder, and sums the cast losses of all processes.
    fn read_output(&self, folder: &Path, stats: &[Stats]) -> ConvertedOutput {
        let files = self.reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect();
        let mut casts = stats[0].casts.clone();
        for (pair, more) in stats[1..].iter().flat_map(|stats| &stats.casts) {
            let sum = casts.get_mut(pair).expect("all ranks cast the same dtypes");
            assert_eq!(sum.tensors, more.tensors);
            sum.overflows += more.overflows;
            sum.nans += more.nans;
        }
        ConvertedOutput { files, casts }
    }
}

/// The bytes of all output files, and for each pair of dtypes the number of tensors that were cast and of values that
/// the casts lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConvertedOutput {
    pub(super) files: Vec<Vec<u8>>,
    casts: BTreeMap<DtypePair, CastCount>,
}

fn options() -> Options {
    Options { threads: 2, write_block_bytes: 1000, transposed_block_bytes: 1000, sync: false }
}

/// Splits each output file at the offsets `cuts` (modulo the length of the file plus 1). Part `n` of file `f` is
/// assigned to process `(n + f) mod ranks`.
pub(super) fn split_output(reservation: &Reservation, cuts: &[u64], ranks: u32) -> Vec<Extents> {
    let mut todos = vec![Extents::new(); ranks as usize];
    for (file, output) in (0..).zip(&reservation.files) {
        let mut ends: Vec<u64> = cuts.iter().map(|cut| cut % (output.len + 1)).chain([output.len]).collect();
        ends.sort_unstable();
        let mut start = 0;
        for (nth, end) in ends.into_iter().enumerate() {
            todos[(nth + file as usize) % ranks as usize].insert(file, start..end);
            start = end;
        }
    }
    todos
}

/// Returns a random visibility in which at least one process sees each file.
fn random_visibility(files: usize, ranks: u32, seed: u64) -> FileVisibility {
    let of_file = |file: usize| {
        let bits = seed.rotate_left(u32::try_from(file % 64).unwrap() * 7);
        let mut seen: smallvec::SmallVec<[u32; 2]> =
            (0..ranks).filter(|rank| (bits >> (rank * 5)).trailing_zeros() > 2).collect();
        if seen.is_empty() {
            seen.push(u32::try_from(file).unwrap() % ranks);
        }
        seen
    };
    FileVisibility::PerRank((0..files).map(of_file).collect())
}

impl Exchange<'_> {
    /// Returns the memory needs of each process, summed over all rounds.
    fn loads(&self) -> Vec<Load> {
        let Self { input, reservation, parties, owners, bucket_bytes } = *self;
        let rounds = Rounds::new(input.catalog, &reservation.tensors, owners, parties, bucket_bytes);
        rounds.fold(vec![Load::default(); parties.nodes.len()], |sums, round| {
            sums.into_iter().zip(round.unwrap().loads).map(|(sum, load)| sum.plus(load)).collect()
        })
    }
}
