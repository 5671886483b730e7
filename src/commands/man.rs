//! `man`: writes a man page for the program and one for each verb.
//!
//! Pages have no date, so the same program writes the same bytes.

use std::fs::{self, File};
use std::io::Write;

use clap::Command;
use clap_mangen::Man as Page;
use serde_json::json;

use super::Status;
use super::printer::Printer;
use dtshard::cli::{self, DESCRIPTION, Man};
use dtshard::{Error, Result};

/// Writes the man pages to a folder.
///
/// # Errors
/// `Io` with the file.
pub fn run(args: &Man, printer: &Printer) -> Result<Status> {
    fs::create_dir_all(&args.dir).map_err(Error::io("create", &args.dir))?;
    let mut names = Vec::new();
    for command in commands() {
        let page = Page::new(command).source(concat!("dtshard ", env!("CARGO_PKG_VERSION"))).manual("dtshard");
        let name = page.get_filename();
        let path = args.dir.join(&name);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        file.write_all(&text(&page)).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))?;
        names.push(name);
    }
    printer.document(&json!({ "files": names }))?;
    printer.line(&format!("wrote {} to {}", dtshard::text::count(names.len(), "man page"), args.dir.display()));
    Ok(Status::Done)
}

/// Returns the program and its verbs, each with the global options. There is no `help` verb, because it gets no page.
fn commands() -> Vec<Command> {
    let mut program = cli::command().disable_help_subcommand(true).long_about(DESCRIPTION);
    program.build();
    let verbs: Vec<Command> = program.get_subcommands().cloned().collect();
    std::iter::once(program).chain(verbs).collect()
}

fn text(page: &Page) -> Vec<u8> {
    let mut text = Vec::new();
    page.render(&mut text).expect("writing to memory");
    text
}
