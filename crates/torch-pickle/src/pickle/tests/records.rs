//! Tests that objects read as object records give the same result as objects read as nodes, also if a byte of the input
//! is changed.

use proptest::prelude::*;

use super::*;

/// A visitor that replaces the objects of five classes of a `.metadata` by rows. If `keeps` is true, it receives these
/// objects as object records (without nodes), otherwise as nodes.
struct RowVisitor {
    keeps: bool,
    /// The number of objects that the visitor received from the fast path (`Reader` in `record.rs`), without nodes.
    records: usize,
    rows: Vec<String>,
}

impl RowVisitor {
    fn push_row(&mut self, class: (&str, &str), record: &Record<'_, '_>) -> Row {
        // After a failed attempt the numbers of rows differ, so a row is described by the content of the rows in it.
        let parts = rows(record).map(|row| self.rows[row.index as usize - 1].clone()).collect::<Vec<_>>();
        self.rows.push(format!("{} {} {parts:?}", class.1, described(record)));
        Row { kind: 0, index: u32::try_from(self.rows.len()).unwrap() }
    }
}

impl Visitor for RowVisitor {
    fn keeps(&self, class: (&str, &str)) -> bool {
        self.keeps && is_kept(class)
    }

    fn record(&mut self, class: (&str, &str), record: &Record<'_, '_>) -> Result<Option<Row>, String> {
        self.records += 1;
        Ok(Some(self.push_row(class, record)))
    }

    fn build(&mut self, class: (&str, &str), _: Ref<'_>, state: Ref<'_>) -> Result<Option<Row>, String> {
        Ok(Fields::of(state).filter(|_| is_kept(class)).map(|fields| self.push_row(class, &fields.record())))
    }
}

fn rows(record: &Record<'_, '_>) -> impl Iterator<Item = Row> {
    record.fields.iter().flat_map(|(_, field)| match field {
        Field::Row(row) => vec![*row],
        Field::Rows(rows) => record.rows_of(*rows).to_vec(),
        _ => Vec::new(),
    })
}

/// Returns the fields of an object record as text. Rows are shown without their indices.
fn described(record: &Record<'_, '_>) -> String {
    let text = |(name, field): &(&[u8], Field<'_>)| match field {
        Field::Row(_) => format!("{name:?} row"),
        Field::Rows(rows) => format!("{name:?} {} rows", record.rows_of(*rows).len()),
        // An empty list matches every element type.
        Field::Dims(none) if none.is_empty() => format!("{name:?} 0 rows"),
        Field::Dims(dims) => format!("{name:?} {:?}", record.numbers_of(*dims)),
        other => format!("{name:?} {other:?}"),
    };
    record.fields.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn is_kept(class: (&str, &str)) -> bool {
    let nested = ["TensorProperties", "TensorStorageMetadata"].contains(&class.1);
    nested || ["ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"].contains(&class.1)
}

/// Parses `bytes` with a [`RowVisitor`]. Returns the visitor's rows without duplicates, the number of objects that it
/// received from the fast path (`Reader` in `record.rs`), and the result of parsing.
fn events_of(bytes: &[u8], keeps: bool) -> (Vec<String>, usize, Result<(String, usize), PickleError>) {
    let mut visitor = RowVisitor { keeps, records: 0, rows: Vec::new() };
    let end = parse(bytes, &mut visitor).map(|(pickle, len)| (pickle.root().describe(), len));
    // Rows that a failed attempt made are made again, so each row is compared once.
    let mut seen = std::collections::HashSet::new();
    visitor.rows.retain(|row| seen.insert(row.clone()));
    (visitor.rows, visitor.records, end)
}

const METADATA: &[u8] = include_bytes!("metadata.4.pkl");

#[test]
fn real_metadata_is_read_as_records() {
    let (with, without) = (events_of(METADATA, true), events_of(METADATA, false));
    assert_eq!((&with.0, &with.2), (&without.0, &without.2));
    // The tensor and its properties are the first objects of their classes. Such objects are never read as object
    // records.
    assert_eq!((with.0.len(), with.1, without.1), (10, 8, 0));
}

#[test]
fn values_fetched_later_are_stored_in_the_memo() {
    // The next index fetches from the memo the offsets of the chunk, and the name of the field with the offsets.
    let mut bytes = b"\x80\x04(ctorch\nSize\n\x94cm\nChunkStorageMetadata\n)\x81}(\x8c\x07offsets\x94h\x00".to_vec();
    bytes.extend(b"K\x01K\x02\x86\x85R\x94\x8c\x05sizesh\x00)\x85Rub");
    bytes.extend(b"cm\nMetadataIndex\n)\x81}(h\x01h\x02\x8c\x01xNubt.");
    let (rows, records, end) = events_of(&bytes, true);
    assert_eq!((records, end), (2, Ok((String::from("tuple"), bytes.len()))));
    assert_eq!(rows, events_of(&bytes, false).0);
    assert!(rows[1].contains("[1, 2]"), "{}", rows[1]);
}

#[test]
fn nested_records_are_read() {
    let mut bytes = b"\x80\x04(ctorch\nSize\n\x94ctorch\nfloat32\n\x94cm\nTensorProperties\n\x94".to_vec();
    bytes.extend(b"cm\nChunkStorageMetadata\n\x94cm\nTensorStorageMetadata\n)\x81}(\x8c\x0aproperties");
    bytes.extend(b"h\x02)\x81(h\x01\x89K\x03K\x01\x86tb\x8c\x04sizeh\x00K\x02K\x03\x86\x85R\x8c\x06chunks](");
    for row in [b"K\x00", b"K\x01"] {
        bytes.extend(b"h\x03)\x81}(\x8c\x07offsetsh\x00");
        bytes.extend(row);
        bytes.extend(b"K\x00\x86\x85R\x8c\x05sizesh\x00K\x01K\x03\x86\x85Rub");
    }
    bytes.extend(b"eubt.");
    let (rows, records, end) = events_of(&bytes, true);
    assert_eq!((rows.len(), records, end), (4, 4, Ok((String::from("tuple"), bytes.len()))));
    assert_eq!(rows, events_of(&bytes, false).0);
    assert!(rows[3].contains("2 rows"), "{}", rows[3]);
}

/// Returns a pickle with a tuple of tensors of one shape. `behind_each` has one item for each tensor: opcodes that
/// follow the tensor. Memo entry 5 is the size of a chunk, and entry 6 is a call that makes the same properties for
/// each tensor.
fn tensors(behind_each: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"\x80\x04(ctorch\nSize\n\x94ctorch\nfloat32\n\x94cm\nTensorProperties\n\x94".to_vec();
    bytes.extend(b"cm\nChunkStorageMetadata\n\x94cm\nTensorStorageMetadata\n\x94h\x00K\x01K\x03\x86\x85R\x94");
    bytes.extend(b"h\x02)R\x94");
    for behind in behind_each {
        bytes.extend(b"h\x04)\x81\x94}\x94(\x8c\x0apropertiesh\x02)\x81(h\x01\x89K\x03K\x01\x86h\x06tb");
        bytes.extend(b"\x8c\x04sizeh\x00K\x02K\x03\x86\x85R\x94\x8c\x06chunks]\x94h\x03)\x81}(");
        bytes.extend(b"\x8c\x07offsetsh\x00K\x00K\x00\x86\x85R\x94\x8c\x05sizesh\x05ubaub");
        bytes.extend(*behind);
    }
    bytes.extend(b"t.");
    bytes
}

#[test]
fn records_with_equal_bytes_become_one_row() {
    for (behind_each, records) in [
        ([b"".as_slice(), b""], 3),
        // These opcodes write a memo entry again that the object records fetch.
        ([b"h\x00K\x09K\x03\x86\x85Rq\x05", b""], 6),
        // These opcodes turn a call into a row. The machine must read the tensors that fetch the call; the chunk is
        // unchanged.
        ([b"h\x06}b", b""], 4),
        // These opcodes fetch the size in the second object record, or the second object record itself.
        ([b"", b"h\x0e"], 6),
        ([b"", b"h\x0c"], 5),
    ] {
        let bytes = tensors(&behind_each);
        let (with, without) = (events_of(&bytes, true), events_of(&bytes, false));
        assert_eq!((&with.0, with.1, &with.2), (&without.0, records, &without.2), "{behind_each:?}");
        assert!(with.2.is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn damaged_metadata_reads_the_same(
        bytes in prop_oneof![Just(METADATA.to_vec()), Just(tensors(&[b"q\x07", b"h\x05", b""]))],
        damage in proptest::collection::vec((0..METADATA.len(), any::<u8>(), 0..3_u8), 1..4),
    ) {
        let mut bytes = bytes;
        for (at, byte, kind) in damage {
            let at = at.min(bytes.len() - 1);
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => _ = bytes.remove(at),
            }
        }
        let (with, without) = (events_of(&bytes, true), events_of(&bytes, false));
        prop_assert_eq!((with.0, with.2), (without.0, without.2));
    }
}
