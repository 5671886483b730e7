//! A small client of the driver API, and functions that run a test in several processes.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ffi::{c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::{env, ptr};

use nccl::{Communicator, Config, DeviceBuffer, DeviceStream, Library, RankPosition, UniqueId, Wait};

/// Returns the path of the library under test, which cargo builds next to the tests.
fn file() -> PathBuf {
    env::current_exe().unwrap().with_file_name("libgpu_stand_in.so")
}

pub fn nccl() -> Library {
    // SAFETY: the library follows the declarations of nccl.h.
    unsafe { Library::load(Some(&file())) }.unwrap()
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        #[allow(non_snake_case)]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($type),*) -> u32,)*
            _library: ManuallyDrop<libloading::Library>,
        }

        impl Driver {
            fn load() -> Self {
                // SAFETY: the functions have the types that cuda.h declares.
                unsafe {
                    let library = libloading::Library::new(file()).unwrap();
                    Self { $($name: *library.get(stringify!($name)).unwrap(),)* _library: ManuallyDrop::new(library) }
                }
            }

            $(
                #[allow(non_snake_case)]
                pub fn $name(&self, $($argument: $type),*) -> u32 {
                    // SAFETY: host addresses are addresses of live values of the test.
                    unsafe { (self.$name)($($argument),*) }
                }
            )*
        }
    };
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, ordinal: c_int);
    fn cuCtxSetCurrent(context: *mut c_void);
    fn cuCtxSynchronize();
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemFreeAsync(address: u64, stream: *mut c_void);
    fn cuMemHostAlloc(address: *mut *mut u8, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(address: *mut u8);
    fn cuMemcpyHtoDAsync_v2(into: u64, from: *const u8, bytes: usize, stream: *mut c_void);
    fn cuMemcpyDtoHAsync_v2(into: *mut u8, from: u64, bytes: usize, stream: *mut c_void);
    fn cuMemcpyDtoDAsync_v2(into: u64, from: u64, bytes: usize, stream: *mut c_void);
    fn cuMemcpy3DAsync_v2(copy: *const [u64; 25], stream: *mut c_void);
    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint);
    fn cuStreamSynchronize(stream: *mut c_void);
    fn cuStreamQuery(stream: *mut c_void);
    fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint);
    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint);
    fn cuEventRecord(event: *mut c_void, stream: *mut c_void);
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const u8);
    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const u8);
}

pub fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(Driver::load)
}

/// Initialises the driver and makes device 0 current in this thread.
pub fn device() {
    let mut context = ptr::null_mut();
    assert_eq!(driver().cuInit(0), 0);
    assert_eq!(driver().cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
    assert_eq!(driver().cuCtxSetCurrent(context), 0);
}

pub struct Stream(pub *mut c_void);

impl Stream {
    pub fn new() -> Self {
        let mut stream = ptr::null_mut();
        assert_eq!(driver().cuStreamCreate(&raw mut stream, 0), 0);
        Self(stream)
    }

    pub fn synchronize(&self) -> u32 {
        driver().cuStreamSynchronize(self.0)
    }
}

// SAFETY: the stream is never destroyed.
unsafe impl DeviceStream for Stream {
    fn handle(&self) -> *mut c_void {
        self.0
    }
}

/// Memory of device 0 that is not freed before the process ends.
pub struct Buffer {
    pub address: u64,
    pub bytes: usize,
}

impl Buffer {
    pub fn new(bytes: usize) -> Self {
        let mut address = 0;
        assert_eq!(driver().cuMemAlloc_v2(&raw mut address, bytes), 0);
        Self { address, bytes }
    }

    pub fn of(data: &[u8], stream: &Stream) -> Self {
        let new = Self::new(data.len());
        assert_eq!(driver().cuMemcpyHtoDAsync_v2(new.address, data.as_ptr(), data.len(), stream.0), 0);
        new
    }

    /// Waits for the stream, and returns the bytes of the buffer.
    pub fn read(&self, stream: &Stream) -> Vec<u8> {
        let mut data = vec![0; self.bytes];
        assert_eq!(driver().cuMemcpyDtoHAsync_v2(data.as_mut_ptr(), self.address, self.bytes, stream.0), 0);
        assert_eq!(stream.synchronize(), 0);
        data
    }
}

// SAFETY: the buffer is never freed.
unsafe impl DeviceBuffer for Buffer {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Runs the ignored test `name` of this binary in `ranks` processes, and returns their exit codes.
pub fn ranks(name: &str, ranks: usize) -> Vec<i32> {
    ranks_with(name, ranks, &[])
}

/// Runs ranks as [`ranks`] does, with additional environment variables, and returns their exit codes.
pub fn ranks_with(name: &str, ranks: usize, environment: &[(&str, &str)]) -> Vec<i32> {
    let id = UniqueId::new(&nccl()).unwrap().to_bytes().map(|byte| format!("{byte:02x}")).concat();
    let start = |rank: usize| -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", name, "--nocapture"])
            .envs([("RANK", rank.to_string()), ("RANKS", ranks.to_string()), ("ID", id.clone())])
            .envs([("GPU_STAND_IN_DEVICES", ranks.to_string()), ("CUDA_VISIBLE_DEVICES", rank.to_string())])
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    children.into_iter().map(|mut child| child.wait().unwrap().code().unwrap_or(-1)).collect()
}

/// Runs the ignored test `name` of this binary in a process, and returns true if the test passes. Each work item on a
/// stream is delayed for so long that the test ends before the work item runs.
pub fn passes_early(name: &str) -> bool {
    let mut early = Command::new(env::current_exe().unwrap());
    early.args(["--ignored", "--exact", name, "--nocapture"]).env("GPU_STAND_IN_DELAY_US", "100000");
    early.stdout(Stdio::null()).status().unwrap().success()
}

/// Returns the number of this rank, and the number of all ranks.
pub fn place() -> RankPosition {
    let number = |name: &str| env::var(name).unwrap().parse().unwrap();
    RankPosition { rank: number("RANK"), ranks: number("RANKS") }
}

pub fn id() -> UniqueId {
    let text = env::var("ID").unwrap();
    UniqueId::from_bytes(std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()))
}

pub fn join(wait: Wait) -> nccl::Result<Communicator> {
    device();
    Communicator::new(&nccl(), place(), &id(), &Config::default(), wait)
}
