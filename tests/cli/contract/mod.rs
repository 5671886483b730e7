//! Tests of the contract of the command line: names and defaults on which scripts depend. Each module tests one
//! section, in the order in which the command line is documented, and each test name states one promise. The first
//! comment of a module lists the promises that other modules test.
//!
//! | promise | module |
//! |---|---|
//! | verbs, hidden aliases, long options with underscores, typing errors | `running` |
//! | `completions`, `man`, `--help`, `--version` | `inspect` beside this folder; the text of `--help`: `messages` beside it |
//! | the promises for new users, the closing line | `consolidate` |
//! | `--from`, `--to`, names of files, parent folders, series, one rank's file | `formats` |
//! | files beside a checkpoint; Lightning's folders | `carried`, `lightning` |
//! | tensors of consolidate, `--root`, `--everything`, `--assets` | `consolidate` |
//! | `--mesh`, `--mesh-ranks`, `--placements` | `layout` |
//! | `--plan`, `--tp`, `--fsdp`, `--replicate` | `plan`; placements of PyTorch: `plans` |
//! | `--layout`, `inspect --layout` | `layout_file` |
//! | `--split`, splits and sizes of a layout file | `splits` |
//! | `--like`, `--fill-from` | `fill`, `fill_optimizers` |
//! | gradients, `--with-grads` | `gradients` |
//! | `--tensor-class` | `sharded_tensors` |
//! | declared layouts: `--src-mesh` to `--reduce` | `declared_layout` |
//! | `flatten`, `--flat-layout` | `flat` |
//! | `--wrap`, `--buffers` | `units`; refusals: `flat` |
//! | `unshard --unit`, `--all-ranks`; `--fill-from` with flat parameters | `flat_back` |
//! | `--include` to `--keep-names`, patterns, collisions, patterns without a match | `names` |
//! | `--dtype`, `--tied`, `--on-conflict`, `--check-replicas`, `--check-crc`, `--allow-missing`, `--drop-unknown` | `values` |
//! | `--tied write` | `tied` |
//! | limits of formats, `--max-shard-size`, natural order, identical bytes | `values` |
//! | `--dry-run` to `--verify`, `--overwrite`, `--restart`, `-q`, `-v`, exit codes, broken pipes | `running` |
//! | `verify`, its exit codes and lists, digests as OTHER | `verify` |
//! | `local` | `local` |
//! | formats and arguments in `--help`, `inspect` of DCP, digests of all tensors | `help` |
//! | errors, and the `--json` document of every verb | `json` |
//! | names in messages: lists, escapes, findings | `messages` |
//! | `inspect`, its document, digests | `inspect` |

mod carried;
mod consolidate;
mod declared_layout;
mod fill;
mod fill_optimizers;
mod flat;
mod flat_back;
mod formats;
mod gradients;
mod help;
mod inspect;
mod json;
mod layout;
mod layout_file;
mod lightning;
mod local;
mod messages;
mod names;
mod plan;
mod running;
mod splits;
mod tied;
mod units;
mod values;
mod verify;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::env::names_below;

/// Returns the paths of the files below a folder, with their content.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = names_below(root).into_iter().filter(|name| root.join(name).is_file());
    files.map(|name| (name.clone(), fs::read(root.join(name)).unwrap())).collect()
}

fn copy_tree(from: &Path, to: &Path) {
    for (name, content) in contents(from) {
        let target = to.join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, content).unwrap();
    }
}

pub fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no `{word}` in: {text}");
    }
}
