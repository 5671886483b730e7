//! Tests of the progress bar on a terminal. The test needs `script` for the terminal, and strace to slow down the run.
//! It is skipped if one of them is missing.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::bad_input::skip;
use crate::common::env::TestEnv;

const COLUMNS: usize = 80;

/// Returns the lines that a terminal shows after this output.
fn screen(text: &str) -> Vec<String> {
    let mut lines = vec![vec![' '; COLUMNS]];
    let (mut row, mut column) = (0_usize, 0_usize);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\r' => column = 0,
            '\n' => row += 1,
            '\u{8}' => column = column.saturating_sub(1),
            '\u{1b}' => {
                let sequence: String = chars.by_ref().skip_while(|c| *c == '[').scan(false, until_letter).collect();
                let number = sequence.trim_end_matches(char::is_alphabetic).parse().unwrap_or(1);
                match sequence.chars().last() {
                    Some('A') => row = row.saturating_sub(number),
                    Some('K') => lines[row] = vec![' '; COLUMNS],
                    _ => {}
                }
            }
            c => {
                if column == COLUMNS {
                    (row, column) = (row + 1, 0);
                }
                lines.resize(lines.len().max(row + 1), vec![' '; COLUMNS]);
                lines[row][column] = c;
                column += 1;
            }
        }
        lines.resize(lines.len().max(row + 1), vec![' '; COLUMNS]);
    }
    lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect()
}

fn until_letter(is_over: &mut bool, c: char) -> Option<char> {
    if *is_over {
        return None;
    }
    *is_over = c.is_alphabetic();
    Some(c)
}

/// Writes a safetensors checkpoint with this number of zero bytes.
fn write_zeros(path: &Path, bytes: usize) {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + bytes) as u64).unwrap();
}

fn has(tool: &str) -> bool {
    Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Reads the output of the terminal until it contains this text.
fn wait_for(child: &mut Child, read: &mut Vec<u8>, expected: &str) {
    let output = child.stdout.as_mut().unwrap();
    let mut block = [0; 4096];
    while !String::from_utf8_lossy(read).contains(expected) {
        let len = output.read(&mut block).unwrap();
        assert!(len > 0, "it ended before `{expected}`: {}", String::from_utf8_lossy(read));
        read.extend_from_slice(&block[..len]);
    }
}

#[test]
fn bar_is_removed_on_ctrl_c() {
    if !has("script") || !has("strace") {
        return skip("no script or no strace here");
    }
    let env = TestEnv::new();
    let source = env.path("w.safetensors");
    write_zeros(&source, 48 << 20);
    let slowly = format!(
        "stty cols {COLUMNS} rows 24; exec strace -f -o {} -e trace=pwrite64 -e inject=pwrite64:delay_enter=30000 \
         {} unshard {} {} --no-sync --threads 1",
        env.path("log").display(),
        env!("CARGO_BIN_EXE_dtshard"),
        source.display(),
        env.path("out.pt").display(),
    );
    let mut script = Command::new("script");
    script.args(["-qefc", &slowly, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = script.spawn().unwrap();
    let mut read = Vec::new();
    wait_for(&mut child, &mut read, "MB/s");
    child.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    child.stdout.as_mut().unwrap().read_to_end(&mut read).unwrap();
    let text = String::from_utf8_lossy(&read).into_owned();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    let shown = screen(&text);
    assert!(shown.iter().any(|line| line.contains("INT")), "{shown:#?}");
    assert!(!shown.iter().any(|line| line.contains("writing") || line.contains('█')), "{shown:#?}");
    assert!(!env.path("out.pt").exists());
}
