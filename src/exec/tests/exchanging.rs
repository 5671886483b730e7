//! Ranks that exchange what they read together write what one process writes.

use std::collections::HashSet;
use std::sync::Arc;

use super::*;
use crate::catalog::{OutputFile, Reserved, Summands, TensorId};
use crate::comm::{Communicator, Local};
use crate::exec::Silent;
use crate::exec::exchange::{Counting, Exchange, HostShuffle, Load, Owners, Parties, Rounds, Shuffle, Sight, agree};
use crate::layout::partial::{Reduction, Share};
use crate::layout::{ReduceOp, Region};
use crate::storage::FileId;

/// How ranks exchange.
pub(crate) trait Means: Sync {
    /// What a rank has for it.
    type Seat: Send;
    type Rank: Communicator;

    /// Called in the thread of each rank, at the same time for all.
    fn seat(&self, rank: Local) -> Self::Seat;

    fn rank(seat: &Self::Seat) -> &Self::Rank;

    fn shuffle(seat: &Self::Seat) -> impl Shuffle;
}

/// In host memory.
struct Host;

impl Means for Host {
    type Seat = Local;
    type Rank = Local;

    fn seat(&self, rank: Local) -> Local {
        rank
    }

    fn rank(seat: &Local) -> &Local {
        seat
    }

    fn shuffle(seat: &Local) -> impl Shuffle {
        HostShuffle::new(seat)
    }
}

/// A checkpoint of a file for each rank of the job that saved it, and one that is laid out.
pub(crate) struct Case {
    folder: tempfile::TempDir,
    files: Files,
    catalog: Catalog,
    reservation: Reservation,
}

/// A tensor to convert: shape, dtypes, both layouts, and how many summands ranks hold of it.
pub(crate) type Spec = (Vec<u64>, (Dtype, Dtype), Layout, Layout, u64);

impl Case {
    pub(crate) fn new(specs: &[Spec], transpose: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut stored: Vec<Vec<u8>> = Vec::new();
        let (mut entries, mut targets) = (Vec::new(), Vec::new());
        let mut outputs: Vec<OutputFile> = Vec::new();
        for (number, (shape, (from_dtype, to_dtype), from, to, summands)) in specs.iter().enumerate() {
            let id = TensorId(u32::try_from(number).unwrap());
            let mut entry = TensorEntry::new(format!("t{number}").into(), *from_dtype, shape.as_slice().into());
            let mut of_chunk = Vec::new();
            for summand in 0..*summands {
                let path = folder.path().join("stored");
                // Three of them are no more than a byte holds.
                let value = |index: u64| element(index * (summand + 1) % 83, from_dtype.itemsize());
                let (_, one) = store_values(shape, *from_dtype, from, transpose, IoMode::Read, &path, &value);
                let bytes = fs::read(&path).unwrap();
                for (rank, mut chunk) in one.chunks.iter().enumerate() {
                    // Ranks that hold one summand are others than those of the next.
                    let rank = rank * usize::try_from(*summands).unwrap() + usize::try_from(summand).unwrap();
                    stored.resize(stored.len().max(rank + 1), vec![0xEE; 7]);
                    if let Place::Bytes { file, offset } = &mut chunk.place {
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
            if *summands > 1 {
                let reduction = Reduction::of(&[*summands], &[Placement::Partial(ReduceOp::Sum)]).unwrap().unwrap();
                entry.summands = Some(Box::new(Summands { reduction, of_chunk }));
            }
            let mut target = TensorEntry::new(entry.fqn.clone(), *to_dtype, shape.as_slice().into());
            for (rank, tile) in to.tiles(shape).into_iter().enumerate() {
                if outputs.len() <= rank {
                    outputs.push(OutputFile::new(format!("out{rank}")));
                }
                let file = &mut outputs[rank];
                file.push_literal(vec![9; 3 + number]);
                let mut place = Place::Nowhere;
                if !tile.is_empty() {
                    let offset = file.push_payload(tile.numel() * to_dtype.itemsize());
                    place = Place::Bytes { file: FileId(u32::try_from(rank).unwrap()), offset };
                }
                target.chunks.push(Chunk { tile, place, strides: None, rank: None });
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

    /// With targets that get sums of a part of the tensor, and nothing elsewhere.
    pub(crate) fn with_gaps(mut self) -> Self {
        for tensor in &mut self.reservation.tensors {
            let source = &self.catalog.tensors[tensor.source.0 as usize];
            let Some(summands) = source.summands.as_ref() else { continue };
            let sizes: Dims = source.shape.iter().map(|size| size.div_ceil(2)).collect();
            let part = Tile::from_region(&Region::new(smallvec::smallvec![0; sizes.len()], sizes));
            let share = Arc::new(Share { within: Some(part), ..summands.reduction.whole() });
            tensor.shares = vec![share; tensor.entry.chunks.len()];
        }
        self
    }

    fn input(&self) -> Input<'_> {
        Input { files: &self.files, catalog: &self.catalog, resolve: &resolve }
    }

    pub(crate) fn alone(&self) -> Vec<Vec<u8>> {
        let folder = self.folder.path().join("alone");
        fs::create_dir(&folder).unwrap();
        copy(self.input(), &self.reservation, &folder, &options(), &Silent, &Stop::default()).unwrap();
        self.written(&folder)
    }

    pub(crate) fn together<M: Means>(
        &self,
        means: &M,
        parties: &Parties,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> (Vec<Vec<u8>>, Vec<Load>) {
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
                        let owners = Owners::new(&self.reservation.files, &heard);
                        let files = self.files.clone();
                        let input = Input { files: &files, ..self.input() };
                        let (reservation, owners) = (&self.reservation, &owners);
                        let exchange = Exchange { input, reservation, parties, owners, bucket_bytes };
                        let path = folder.join(format!("{}.journal", rank.rank()));
                        let log = Log::new(&reservation.files, todo, path, false, AtEnd::Nothing);
                        let shuffle = M::shuffle(&seat);
                        let (log, options, stop) = (&log, &options(), &Stop::default());
                        let writing = Writing { reservation, folder, log, options, reporter: &Silent, stop };
                        exchange.run(rank, shuffle, writing).unwrap();
                        // Who is dropped sooner has failed.
                        rank.barrier().unwrap();
                        exchange.dry_run(&Stop::default()).unwrap().1
                    })
                })
                .collect();
            let loads: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!(loads.iter().all(|other| *other == loads[0]), "all make the same plan");
            (self.written(&folder), loads[0].clone())
        })
    }

    /// Dealt out, as [`deal`], and seen as `wish` says: what every property of exchanges has.
    pub(crate) fn parties(&self, ranks: u32, cuts: &[u64], wish: Option<u64>) -> (Parties, Vec<Extents>) {
        let sight = wish.map_or(Sight::Shared, |wish| seen(self.files.ids().count(), ranks, wish));
        let parties = Parties { sight, nodes: (0..ranks).map(|rank| rank / 2).collect(), counting: Counting::Any };
        (parties, deal(&self.reservation, cuts, ranks))
    }

    /// Bytes of the source that are needed for what is to be done, and that no file holds which is seen.
    fn lacking(&self, todo: &Extents, sees: &dyn Fn(FileId) -> bool) -> u64 {
        let lacking = self.reservation.tensors.iter().map(|tensor| {
            let source = self.catalog.tensor(tensor.source);
            let (shape, itemsize) = (&source.shape, tensor.dtype().itemsize());
            let mut needed = HashSet::new();
            for (index, chunk) in tensor.entry.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.place(index) else { continue };
                for (local, element) in (0..).zip(linear_indices(shape, &chunk.tile)) {
                    let at = offset + local * itemsize;
                    if todo.overlaps(file, &(at..at + itemsize)) {
                        needed.insert(element);
                    }
                }
            }
            let mut lacking = 0;
            let summands = source.summands.as_ref();
            for summand in 0..summands.map_or(1, |of| of.reduction.count()) {
                let mut lacked = needed.clone();
                for (index, chunk) in source.chunks.iter().enumerate() {
                    let is_of_it = summands.is_none_or(|of| of.of_chunk[index] == summand);
                    if is_of_it && chunk.place.file().is_some_and(sees) {
                        for element in linear_indices(shape, &chunk.tile) {
                            lacked.remove(&element);
                        }
                    }
                }
                lacking += lacked.len() as u64 * source.dtype.itemsize();
            }
            lacking
        });
        lacking.sum()
    }

    fn written(&self, folder: &Path) -> Vec<Vec<u8>> {
        self.reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect()
    }
}

fn options() -> Options {
    Options { threads: 2, strip_bytes: 1000, sync: false }
}

/// The output files, cut at these places, dealt out in turn.
fn deal(reservation: &Reservation, cuts: &[u64], ranks: u32) -> Vec<Extents> {
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

pub(crate) fn spec() -> impl Strategy<Value = Spec> {
    let dtypes = prop::sample::select(vec![
        (Dtype::U8, Dtype::U8),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::I64, Dtype::I64),
        (Dtype::F32, Dtype::Bf16),
    ]);
    prop::collection::vec(0..9_u64, 0..4).prop_flat_map(move |shape| {
        let ndim = shape.len();
        (Just(shape), dtypes.clone(), layout(ndim), layout(ndim), prop_oneof![3 => Just(1_u64), 1 => 2..4_u64])
    })
}

/// Whether its lengths can be told.
pub(crate) fn fits((shape, (from, to), ..): &Spec) -> bool {
    checked_len_bytes(shape, *from).is_some() && checked_len_bytes(shape, *to).is_some()
}

/// Which ranks see which files: each is seen by some.
fn seen(files: usize, ranks: u32, wish: u64) -> Sight {
    let of_file = |file: usize| {
        let bits = wish.rotate_left(u32::try_from(file % 64).unwrap() * 7);
        let mut seen: smallvec::SmallVec<[u32; 2]> =
            (0..ranks).filter(|rank| (bits >> (rank * 5)).trailing_zeros() > 2).collect();
        if seen.is_empty() {
            seen.push(u32::try_from(file).unwrap() % ranks);
        }
        seen
    };
    Sight::PerRank((0..files).map(of_file).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn ranks_together_write_what_one_process_writes(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        ranks in 1..6_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![Just(1_u64), 16..400_u64, Just(1 << 20)],
        wish in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(fits));
        let case = Case::new(&specs, transpose);
        let (parties, todos) = case.parties(ranks, &cuts, wish);
        let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
        let sent: u64 = loads.iter().map(|load| load.sent).sum();
        prop_assert_eq!(sent, loads.iter().map(|load| load.received).sum::<u64>());
        let stored = case.catalog.tensors.iter().map(|entry| {
            entry.numel() * entry.dtype.itemsize() * entry.summands.as_ref().map_or(1, |of| of.reduction.count())
        });
        match &parties.sight {
            // Every byte is read once, whoever reads it.
            Sight::Shared => prop_assert_eq!(loads.iter().map(|load| load.read).sum::<u64>(), stored.sum::<u64>()),
            // Nobody gets what it has, nor anything twice.
            Sight::PerRank(seen) => for (rank, (todo, load)) in (0..).zip(todos.iter().zip(&loads)) {
                prop_assert_eq!(load.received, case.lacking(todo, &|FileId(file)| seen[file as usize].contains(&rank)));
            },
        }
    }
}

/// Rows of one rank each, of tensors that take several rounds, and of small ones between them.
#[test]
fn tensors_are_through_one_after_the_other() {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let tensor = |rows_of: u64| (vec![rows_of, 8], (Dtype::F32, Dtype::F32), rows(2), rows(3), 1);
    let case = Case::new(&[tensor(64), tensor(64), tensor(2), tensor(2), tensor(64)], false);
    let todos = deal(&case.reservation, &[], 2);
    let owners = Owners::new(&case.reservation.files, &todos);
    let parties = Parties { sight: Sight::Shared, nodes: vec![0, 0], counting: Counting::Any };
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, 300);
    let rounds: Vec<(Vec<usize>, bool)> = rounds
        .map(|round| {
            let round = round.unwrap();
            (round.drafts.iter().map(|draft| draft.unit.number).collect(), round.ends_whole)
        })
        .collect();
    let ends: Vec<&Vec<usize>> = rounds.iter().filter(|(_, ends)| *ends).map(|(numbers, _)| numbers).collect();
    assert!(ends.iter().all(|numbers| !numbers.is_empty()));
    let through: Vec<usize> = ends.iter().filter_map(|numbers| numbers.last()).copied().collect();
    assert_eq!(through, [0, 1, 3, 4]);
    assert!(rounds.len() > 8, "{rounds:?}");
}
