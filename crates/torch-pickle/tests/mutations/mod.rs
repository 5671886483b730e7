//! Mutations of valid inputs, for tests of parsers that must read or refuse every input.

use bolero::TypeGenerator;

/// One change of a file. A position that is beyond the end of the file is taken modulo its length.
#[derive(Clone, Debug, TypeGenerator)]
pub enum Edit {
    Replace { at: u16, byte: Byte },
    Insert { at: u16, byte: Byte },
    Remove { at: u16, len: u8 },
    Copy { at: u16, len: u8, to: u16 },
}

/// A byte to write. Often it is a byte that parsers treat in a special way.
#[derive(Clone, Debug, TypeGenerator)]
pub enum Byte {
    Any(u8),
    Special(u8),
}

impl Byte {
    fn value(&self) -> u8 {
        const SPECIAL: [u8; 12] = [0, 1, 0x7f, 0x80, 0xff, b'[', b'{', b'"', b'(', b'e', b'.', b'9'];
        match self {
            Self::Any(byte) => *byte,
            Self::Special(index) => SPECIAL[usize::from(*index) % SPECIAL.len()],
        }
    }
}

impl Edit {
    pub fn apply(&self, bytes: &mut Vec<u8>) {
        const MOST: u8 = 32;
        let len = bytes.len();
        let position = |at: u16| usize::from(at) % len.max(1);
        let range = |at: u16, count: u8| position(at)..(position(at) + usize::from(count % MOST)).min(len);
        match self {
            Self::Replace { at, byte } if len > 0 => bytes[position(*at)] = byte.value(),
            Self::Replace { .. } => {}
            Self::Insert { at, byte } => bytes.insert(position(*at), byte.value()),
            Self::Remove { at, len } => drop(bytes.drain(range(*at, *len))),
            Self::Copy { at, len, to } => {
                let copy = bytes[range(*at, *len)].to_vec();
                let to = position(*to);
                bytes.splice(to..to, copy);
            }
        }
    }
}

/// Gives each of the valid inputs, and mutated inputs, to a parser. It is a macro, because bolero names a fuzz target
/// after the function that calls bolero.
macro_rules! fuzz {
    ($corpus:expr, $mutations:expr, $parse:expr) => {{
        let (corpus, parse): (Vec<Vec<u8>>, _) = ($corpus, $parse);
        corpus.iter().for_each(|bytes| parse(bytes.as_slice()));
        let input = (bolero::produce::<u8>(), bolero::produce::<Vec<mutations::Edit>>().with().len(1..6_usize));
        bolero::check!().with_generator(input).with_iterations($mutations).for_each(|(file, edits)| {
            let mut bytes = corpus[usize::from(*file) % corpus.len()].clone();
            edits.iter().for_each(|edit| edit.apply(&mut bytes));
            let start = std::time::Instant::now();
            parse(bytes.as_slice());
            assert!(
                start.elapsed() < std::time::Duration::from_secs(20),
                "slow: {:?}",
                String::from_utf8_lossy(&bytes)
            );
        });
    }};
}
