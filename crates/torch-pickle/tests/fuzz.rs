//! Mutated pickles and archives are read or refused, and nothing panics. If a pickle can be read, its value is also
//! written and read back.

#[macro_use]
mod mutations;

use torch_pickle::pickle::{NoVisitor, Unknown, Writer, decode_with, parse};
use torch_pickle::zip::{Archive, Frame};

type Value = torch_pickle::Value<u32>;

#[test]
fn pickles() {
    let corpus = vec![
        include_bytes!("../src/pickle/tests/everything.2.pkl").to_vec(),
        include_bytes!("../src/pickle/tests/everything.5.pkl").to_vec(),
        include_bytes!("../src/pickle/tests/metadata.4.pkl").to_vec(),
        b"\x80\x02}X\x01\0\0\0a](K\x01K\x02es.".to_vec(),
    ];
    let read = |bytes: &[u8]| -> Option<Value> {
        let (pickle, _) = parse(bytes, &mut NoVisitor).ok()?;
        Some(decode_with(pickle.root(), Unknown::Drop, &mut |_| Ok(None)).ok()?.value)
    };
    fuzz!(corpus, 20_000, |bytes: &[u8]| {
        let Some(value) = read(bytes) else { return };
        let mut writer = Writer::new();
        let written = writer.value(&value, &mut |_: &mut Writer, _| unreachable!("no node was taken for a tensor"));
        if written.is_ok() {
            assert_eq!(read(&writer.finish()), Some(value));
        }
    });
}

#[test]
fn archives() {
    let corpus = vec![include_bytes!("foreign.pt").to_vec()];
    fuzz!(corpus, 20_000, |bytes: &[u8]| {
        let Ok(archive) = Archive::read(bytes) else { return };
        for (name, record) in archive.records() {
            let content = archive.content(bytes, name, 1 << 20);
            assert!(content.is_err() || content.is_ok_and(|content| content.unwrap().len() as u64 == record.len));
        }
        let _ = archive.check(bytes, &mut |_| Ok(()));
        let whole = 0..bytes.len() as u64;
        if let Ok(Some(frame)) = Frame::of(bytes, whole.clone(), &archive, &["data.pkl"], "data/0") {
            let located = archive.locate(bytes, "data/0").unwrap();
            assert_eq!(frame.find(bytes, whole, &mut Vec::new()).unwrap(), located);
        }
    });
}
