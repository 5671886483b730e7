//! A checkpoint, what is made of it, and how: alone and together.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::{Means, Spec, hard, term};
use crate::catalog::{OutputFile, PartialValues, Reserved, TensorId};
use crate::comm::{Communicator, Local};
use crate::exchange::{Counting, Exchange, FileOwners, FileVisibility, Load, ReductionMethod, Rounds, Topology, agree};
use crate::exec::Silent;
use crate::exec::cast::DtypePair;
use crate::exec::copy::CastCount;
use crate::exec::tests::*;
use crate::layout::Region;
use crate::layout::partial::{PartialReduction, Share};
use crate::storage::{AnchoredPath, FileId};

/// A checkpoint of a file for each rank of the job that saved it, and one that is laid out.
pub(crate) struct Case {
    pub(super) folder: tempfile::TempDir,
    pub(super) files: Files,
    pub(super) catalog: Catalog,
    pub(super) reservation: Reservation,
}

impl Case {
    pub(crate) fn new(specs: &[Spec], transpose: bool) -> Self {
        Self::of_terms(specs, transpose, &term)
    }

    /// Of elements that casts do not keep, some of them.
    pub(crate) fn hard(specs: &[Spec], transpose: bool) -> Self {
        Self::of_elements(specs, transpose, &hard)
    }

    /// With elements of summands by dtype, index and number of the summand.
    pub(super) fn of_terms(specs: &[Spec], transpose: bool, term: &dyn Fn(Dtype, u64, u64) -> Vec<u8>) -> Self {
        let plain = |dtype: Dtype, index| element(index, dtype.itemsize());
        Self::of_elements(specs, transpose, &|dtype, index, summand| {
            summand.map_or_else(|| plain(dtype, index), |summand| term(dtype, index, summand))
        })
    }

    /// With elements by dtype, index and number of the summand, if they are of one.
    fn of_elements(specs: &[Spec], transpose: bool, value: &dyn Fn(Dtype, u64, Option<u64>) -> Vec<u8>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut stored: Vec<Vec<u8>> = Vec::new();
        let (mut entries, mut targets) = (Vec::new(), Vec::new());
        let mut outputs: Vec<OutputFile> = Vec::new();
        for (number, (shape, (from_dtype, to_dtype), from, to, summands)) in specs.iter().enumerate() {
            let id = TensorId(u32::try_from(number).unwrap());
            let mut entry = TensorEntry::new(format!("t{number}").into(), *from_dtype, shape.as_slice().into());
            let mut of_chunk = Vec::new();
            let count = summands.map_or(1, |(count, _)| count);
            for summand in 0..count {
                let path = folder.path().join("stored");
                let value = |index: u64| value(*from_dtype, index, summands.map(|_| summand));
                let (_, one) = store_values(shape, *from_dtype, from, transpose, IoMode::Read, &path, &value);
                let bytes = fs::read(&path).unwrap();
                for (rank, mut chunk) in one.chunks.iter().enumerate() {
                    // Ranks that hold one summand are others than those of the next.
                    let rank = rank * usize::try_from(count).unwrap() + usize::try_from(summand).unwrap();
                    stored.resize(stored.len().max(rank + 1), vec![0xEE; 7]);
                    if let FileLocation::Bytes { file, offset } = &mut chunk.location {
                        let start = usize::try_from(*offset).unwrap();
                        let len = usize::try_from(chunk.tile.numel() * from_dtype.itemsize()).unwrap();
                        *file = FileId(u32::try_from(rank).unwrap());
                        *offset = stored[rank].len() as u64;
                        stored[rank].extend_from_slice(&bytes[start..start + len]);
                    }
                    entry.chunks.push(chunk);
                    of_chunk.push(summand);
                }
            }
            if let Some((count, op)) = summands {
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
                target.chunks.push(Chunk { tile, location, strides: None, rank: None });
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

    /// With targets that get shares of it: sums of a part of the tensor and nothing elsewhere, summands as they are, and
    /// parts of values.
    pub(crate) fn with_shares(mut self) -> Self {
        for tensor in &mut self.reservation.tensors {
            let source = &self.catalog.tensors[tensor.source.0 as usize];
            let shares = |of_chunk: &dyn Fn(usize) -> Share| {
                (0..tensor.entry.chunks.len()).map(|chunk| Arc::new(of_chunk(chunk))).collect()
            };
            tensor.shares = match &source.partial_values {
                Some(summands) => {
                    let sizes: Dims = source.shape.iter().map(|size| size.div_ceil(2)).collect();
                    let part = Tile::from_region(&Region::new(smallvec::smallvec![0; sizes.len()], sizes));
                    let whole = summands.reduction.full_reduction();
                    let own = |chunk: usize| chunk as u64 % summands.reduction.count();
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

    pub(crate) fn alone(&self) -> Written {
        let stats = self.attempt_alone().unwrap();
        self.written(&self.folder.path().join("alone"), &[stats])
    }

    pub(super) fn attempt_alone(&self) -> Result<Stats> {
        let folder = self.folder.path().join("alone");
        fs::create_dir(&folder).unwrap();
        copy(self.input(), &self.reservation, &folder, &options(), &Silent, &Stop::default())
    }

    pub(crate) fn together<M: Means>(
        &self,
        means: &M,
        parties: &Topology,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> (Written, Vec<Load>) {
        let loads = self.attempt(means, parties, todos, bucket_bytes);
        let (loads, stats): (Vec<Vec<Load>>, Vec<Stats>) = loads.into_iter().map(Result::unwrap).unzip();
        assert!(loads.iter().all(|other| *other == loads[0]), "all make the same plan");
        (self.written(&self.folder.path().join("together"), &stats), loads[0].clone())
    }

    /// What each rank foresees for all, and what it has done, if it gets to the end.
    pub(super) fn attempt<M: Means>(
        &self,
        means: &M,
        parties: &Topology,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> Vec<Result<(Vec<Load>, Stats)>> {
        let folder = self.folder.path().join("together");
        fs::create_dir(&folder).unwrap();
        let ranks = Local::fleet(parties.size());
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .zip(todos)
                .map(|(rank, todo)| {
                    let folder = &folder;
                    scope.spawn(move || {
                        let seat = means.seat(rank);
                        let rank = M::rank(&seat);
                        let heard = agree(rank, &self.reservation.files, todo).unwrap();
                        assert_eq!(heard, todos);
                        let owners = FileOwners::new(&self.reservation.files, &heard);
                        let files = self.files.clone();
                        let input = Input { files: &files, ..self.input() };
                        let (reservation, owners) = (&self.reservation, &owners);
                        let exchange = Exchange { input, reservation, parties, owners, bucket_bytes };
                        let folder = &AnchoredPath::new(folder);
                        let path = folder.join(format!("{}.journal", rank.rank()));
                        let log = Log::new(&reservation.files, todo, path, false, AtEnd::Nothing);
                        let shuffle = M::shuffle(&seat);
                        let (log, options, stop) = (&log, &options(), &Stop::default());
                        let writing = WriteContext { reservation, folder, log, options, reporter: &Silent, stop };
                        let stats = exchange.run(rank, shuffle, writing)?;
                        // A rank that leaves sooner fails the others.
                        rank.barrier().unwrap();
                        if let Some(counted) = M::counted(&seat) {
                            let load = exchange.loads()[rank.rank() as usize];
                            assert_eq!(
                                counted,
                                (load.sent(), load.received()),
                                "what goes over the wire is what is planned"
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

    /// Dealt out, as [`deal`], and seen as `wish` says: what every property of exchanges has.
    pub(crate) fn parties(&self, ranks: u32, cuts: &[u64], wish: Option<u64>) -> (Topology, Vec<Extents>) {
        let sight = wish.map_or(FileVisibility::Shared, |wish| seen(self.files.ids().count(), ranks, wish));
        let parties = Topology {
            sight,
            nodes: (0..ranks).map(|rank| rank / 2).collect(),
            counting: Counting::Any,
            reducing: ReductionMethod::InRankOrder,
        };
        (parties, deal(&self.reservation, cuts, ranks))
    }

    /// Make room for another exchange.
    pub(super) fn forget_together(&self) {
        fs::remove_dir_all(self.folder.path().join("together")).unwrap();
    }

    /// What is in a folder after runs with these figures.
    fn written(&self, folder: &Path, stats: &[Stats]) -> Written {
        let files = self.reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect();
        let mut casts = stats[0].casts.clone();
        for (pair, more) in stats[1..].iter().flat_map(|stats| &stats.casts) {
            let sum = casts.get_mut(pair).expect("all cast the same");
            assert_eq!(sum.tensors, more.tensors);
            sum.overflows += more.overflows;
            sum.nans += more.nans;
        }
        Written { files, casts }
    }
}

/// The bytes of all files, and what casts met.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(super) files: Vec<Vec<u8>>,
    casts: BTreeMap<DtypePair, CastCount>,
}

fn options() -> Options {
    Options { threads: 2, write_block_bytes: 1000, sync: false }
}

/// The output files, cut at these places, dealt out in turn.
pub(super) fn deal(reservation: &Reservation, cuts: &[u64], ranks: u32) -> Vec<Extents> {
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

/// Which ranks see which files: each is seen by some.
fn seen(files: usize, ranks: u32, wish: u64) -> FileVisibility {
    let of_file = |file: usize| {
        let bits = wish.rotate_left(u32::try_from(file % 64).unwrap() * 7);
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
    /// What each rank has in all rounds.
    fn loads(&self) -> Vec<Load> {
        let Self { input, reservation, parties, owners, bucket_bytes } = *self;
        let rounds = Rounds::new(input.catalog, &reservation.tensors, owners, parties, bucket_bytes);
        rounds.fold(vec![Load::default(); parties.nodes.len()], |sums, round| {
            sums.into_iter().zip(round.unwrap().loads).map(|(sum, load)| sum.plus(load)).collect()
        })
    }
}
