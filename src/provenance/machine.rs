//! What this machine says about itself, as far as it says anything.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use serde::{Deserialize, Serialize};

/// The machine, as it was before the first timed call.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: Option<String>,
    /// Logical processors that are switched on, where the system lists them.
    pub cpus: Option<usize>,
    /// Logical processors that this process may use.
    pub usable_cpus: usize,
    /// The list of those, where the system gives one.
    pub affinity: Option<String>,
    /// Processors' worth of time that a control group grants.
    pub quota: Option<f64>,
    /// Frequency governors in use; empty where the system names none.
    pub governors: Vec<String>,
    /// Lowest and highest current frequency, in MHz.
    pub mhz: Option<[f64; 2]>,
    /// Whether every processor's lowest and highest allowed frequency are the same.
    pub clocks_locked: Option<bool>,
    /// Whether boost frequencies are allowed.
    pub boost: Option<bool>,
    /// Times that the processor was throttled since it started.
    #[serde(rename = "throttle_events_since_boot")]
    pub throttled: Option<u64>,
    /// Whether a hypervisor runs this machine.
    pub virtual_machine: Option<bool>,
    /// Memory in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory: Option<u64>,
    /// Distribution.
    pub system: Option<String>,
    /// Kernel and its release.
    pub kernel: Option<String>,
    /// Graphics processors: name, driver, clocks, throttle reasons.
    pub gpus: Option<Vec<String>>,
}

/// What changes while a benchmark runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Load averages of 1, 5 and 15 minutes.
    #[serde(rename = "load_averages")]
    pub load: Option<[f64; 3]>,
    /// Most resident memory of this process so far, in bytes (`VmHWM`).
    #[serde(rename = "peak_memory_bytes")]
    pub peak_memory: Option<u64>,
    /// Time of the processors that this process may use.
    pub ticks: Option<Ticks>,
}

/// Time of processors since the machine started, in the system's clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticks {
    /// How many processors.
    pub cpus: usize,
    /// Of all of them.
    pub all: u64,
    /// In which some program of this machine ran.
    pub busy: u64,
    /// In which this process ran.
    pub own: u64,
    /// That other machines took.
    #[serde(default)]
    pub stolen: u64,
}

impl Machine {
    /// Name of the processor.
    pub fn processor() -> Option<String> {
        let by_system = || std::env::var("PROCESSOR_IDENTIFIER").ok().filter(|_| cfg!(windows));
        text("/proc/cpuinfo").as_deref().and_then(processor).or_else(by_system)
    }

    /// Reads what there is to read.
    pub fn read() -> Self {
        let cpuinfo = text("/proc/cpuinfo").unwrap_or_default();
        let status = text("/proc/self/status").unwrap_or_default();
        let clocks = || fields(&cpuinfo, "cpu MHz").filter_map(|text| text.parse::<f64>().ok());
        let mhz = clocks().reduce(f64::min).zip(clocks().reduce(f64::max)).map(|(low, high)| [low, high]);
        let is_virtual = |flags: &str| flags.split_whitespace().any(|flag| flag == "hypervisor");
        Self {
            cpu: Self::processor(),
            cpus: Some(fields(&cpuinfo, "processor").count()).filter(|count| *count > 0),
            usable_cpus: std::thread::available_parallelism().map_or(1, usize::from),
            affinity: fields(&status, "Cpus_allowed_list").next().map(str::to_owned),
            quota: text("/sys/fs/cgroup/cpu.max").as_deref().and_then(quota),
            governors: each_cpu("cpufreq/scaling_governor").into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
            mhz,
            clocks_locked: clocks_locked(),
            boost: text("/sys/devices/system/cpu/cpufreq/boost").map(|text| text == "1"),
            throttled: sum(&each_cpu("thermal_throttle/core_throttle_count")),
            virtual_machine: fields(&cpuinfo, "flags").next().map(is_virtual),
            memory: text("/proc/meminfo").and_then(|text| kilobytes(&text, "MemTotal")),
            system: text("/etc/os-release").and_then(|text| pretty_name(&text)),
            kernel: text("/proc/sys/kernel/ostype")
                .zip(text("/proc/sys/kernel/osrelease"))
                .map(|(kind, release)| format!("{kind} {release}")),
            gpus: gpus(),
        }
    }
}

impl Moment {
    /// Reads what there is to read.
    pub fn read() -> Self {
        let status = text("/proc/self/status");
        Self {
            load: text("/proc/loadavg").as_deref().and_then(load),
            peak_memory: status.as_deref().and_then(|text| kilobytes(text, "VmHWM")),
            ticks: status.as_deref().and_then(|text| {
                let usable = fields(text, "Cpus_allowed_list").next().and_then(cpus)?;
                ticks(&self::text("/proc/stat")?, &self::text("/proc/self/stat")?, &usable)
            }),
        }
    }
}

impl Ticks {
    /// Processors' worth of time that other programs of this machine took since `before`.
    #[allow(clippy::cast_precision_loss)]
    pub fn of_others_since(&self, before: &Self) -> Option<f64> {
        let since = |of: fn(&Self) -> u64| of(self).checked_sub(of(before));
        let (all, busy, own) = (since(|ticks| ticks.all)?, since(|ticks| ticks.busy)?, since(|ticks| ticks.own)?);
        (all > 0).then(|| busy.saturating_sub(own) as f64 / all as f64 * self.cpus as f64)
    }

    /// How many processors other machines took on average since `before`; `None` where no time has passed.
    #[allow(clippy::cast_precision_loss)]
    pub fn stolen_since(&self, before: &Self) -> Option<f64> {
        let (all, stolen) = (self.all.checked_sub(before.all)?, self.stolen.checked_sub(before.stolen)?);
        (all > 0).then(|| stolen as f64 / all as f64 * self.cpus as f64)
    }
}

/// Resident memory of this process now, in bytes.
pub(crate) fn resident_memory() -> Option<u64> {
    text("/proc/self/status").and_then(|text| kilobytes(&text, "VmRSS"))
}

/// Lets `VmHWM` begin anew from what is resident now; false where the system does not.
pub(crate) fn reset_peak_memory() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The values of `name : value`, line by line.
fn fields<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.filter(move |(found, _)| found.trim() == name).map(|(_, value)| value.trim())
}

/// The processor of a `/proc/cpuinfo`: its name, or on ARM, where there is none, the numbers of each kind of core.
fn processor(cpuinfo: &str) -> Option<String> {
    if let Some(name) = fields(cpuinfo, "model name").next() {
        return Some(name.to_owned());
    }
    let revisions = fields(cpuinfo, "CPU variant").zip(fields(cpuinfo, "CPU revision"));
    let parts = fields(cpuinfo, "CPU implementer").zip(fields(cpuinfo, "CPU part")).zip(revisions);
    let text = |((implementer, part), (variant, revision))| {
        format!("ARM implementer {implementer} part {part} variant {variant} revision {revision}")
    };
    let kinds: BTreeSet<String> = parts.map(text).collect();
    (!kinds.is_empty()).then(|| kinds.into_iter().collect::<Vec<_>>().join(", "))
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = fields(text, name).next()?.strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    Some(1024 * value)
}

fn each_cpu(file: &str) -> Vec<String> {
    let entries = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    entries.filter_map(|entry| text(entry.path().join(file))).collect()
}

fn clocks_locked() -> Option<bool> {
    let (low, high) = (each_cpu("cpufreq/scaling_min_freq"), each_cpu("cpufreq/scaling_max_freq"));
    (!low.is_empty() && low.len() == high.len()).then(|| low == high)
}

fn sum(counts: &[String]) -> Option<u64> {
    if counts.is_empty() { None } else { counts.iter().map(|count| count.parse::<u64>().ok()).sum() }
}

/// `150000 100000` is one and a half processors, `max 100000` is no limit.
fn quota(text: &str) -> Option<f64> {
    let (granted, period) = text.split_once(' ')?;
    Some(granted.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

fn pretty_name(text: &str) -> Option<String> {
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches('"').to_owned())
}

fn load(text: &str) -> Option<[f64; 3]> {
    let numbers: Vec<f64> = text.split(' ').take(3).filter_map(|number| number.parse().ok()).collect();
    numbers.try_into().ok()
}

/// The numbers of a list such as `0-2,5`.
fn cpus(list: &str) -> Option<BTreeSet<usize>> {
    let mut all = BTreeSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.trim().parse::<usize>().ok()?..=last.trim().parse().ok()?);
    }
    Some(all)
}

/// The lines of the processors `usable` in `/proc/stat`, beside user and system time of `/proc/self/stat`. Idle is the
/// fourth number and waiting for a disk the fifth; time that other machines took, the eighth, is no program's here.
fn ticks(stat: &str, own: &str, usable: &BTreeSet<usize>) -> Option<Ticks> {
    let mut ticks = Ticks::default();
    for line in stat.lines() {
        let mut words = line.split_whitespace();
        let number = words.next().and_then(|word| word.strip_prefix("cpu")).and_then(|number| number.parse().ok());
        if !number.is_some_and(|number| usable.contains(&number)) {
            continue;
        }
        let times: Vec<u64> = words.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        ticks.cpus += 1;
        ticks.all += times.iter().sum::<u64>();
        ticks.stolen += times.get(7).copied().unwrap_or(0);
        ticks.busy +=
            times.iter().enumerate().filter(|(place, _)| ![3, 4, 7].contains(place)).map(|(_, time)| time).sum::<u64>();
    }
    let (_, behind_name) = own.rsplit_once(')')?;
    let times = behind_name.split_whitespace().skip(11).take(2).map(|time| time.parse::<u64>().ok());
    ticks.own = times.sum::<Option<u64>>()?;
    (ticks.all > 0).then_some(ticks)
}

/// What the driver's own tool says; `None` where there is no such tool.
fn gpus() -> Option<Vec<String>> {
    const FIELDS: &str = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks_throttle_reasons.active,power.draw,temperature.gpu";
    let arguments = [format!("--query-gpu={FIELDS}"), "--format=csv,noheader".to_owned()];
    let output = Command::new("nvidia-smi").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_understood() {
        assert_eq!(quota("150000 100000"), Some(1.5));
        assert_eq!(quota("max 100000"), None);
        assert_eq!(load("0.29 1.40 2.75 1/300 17"), Some([0.29, 1.4, 2.75]));
        assert_eq!(kilobytes("Name:\tx\nVmHWM:\t  12 kB\n", "VmHWM"), Some(12 * 1024));
        assert_eq!(pretty_name("ID=x\nPRETTY_NAME=\"An OS 1\"\n").as_deref(), Some("An OS 1"));
        assert_eq!(fields("cpu MHz\t: 2600.5\ncpu MHz : 1.0", "cpu MHz").collect::<Vec<_>>(), ["2600.5", "1.0"]);
        assert_eq!(sum(&["3".into(), "4".into()]), Some(7));
        assert_eq!(sum(&[]), None);
        assert_eq!(cpus("0-2,5"), Some([0, 1, 2, 5].into()));
        assert_eq!(cpus("none"), None);
    }

    #[test]
    fn processors_have_a_name_or_the_numbers_of_their_cores() {
        assert_eq!(processor("processor: 0\nmodel name: A 1\nprocessor: 1\nmodel name: A 1").as_deref(), Some("A 1"));
        let core = |part: &str| {
            format!(
                "processor: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 2\n"
            )
        };
        let of = |part: &str| format!("ARM implementer 0x41 part {part} variant 0x1 revision 2");
        assert_eq!(processor(&core("0xd40").repeat(2)), Some(of("0xd40")));
        let two = [core("0xd44"), core("0xd40"), core("0xd44")].concat();
        assert_eq!(processor(&two), Some(format!("{}, {}", of("0xd40"), of("0xd44"))));
        assert_eq!(processor("processor: 0\nCPU part: 0xd40\n"), None);
    }

    #[test]
    fn the_time_of_other_programs_is_what_is_left_of_busy_processors() {
        let own = |user: u64| format!("17 (a) b) S 1 1 1 0 -1 0 0 0 0 0 {user} 5 0 0 20");
        let at = |busy: u64, idle: u64, user: u64| {
            let stat = format!("cpu  1 2 3 4\ncpu0 9 9 9 9 9 9 9 9\ncpu1 {busy} 0 10 {idle} 5 0 0 7 3 0\nintr 1");
            ticks(&stat, &own(user), &[1].into()).unwrap()
        };
        let before = at(100, 50, 60);
        assert_eq!(before, Ticks { cpus: 1, all: 172, busy: 110, own: 65, stolen: 7 });
        assert_eq!(at(180, 70, 100).of_others_since(&before), Some(0.4));
        assert_eq!(before.of_others_since(&before), None);
        let stolen = Ticks { all: before.all + 50, stolen: before.stolen + 5, ..before };
        assert_eq!([stolen, before].map(|after| after.stolen_since(&before)), [Some(0.1), None]);
        assert_eq!(ticks("cpu  1 2 3 4", &own(1), &[1].into()), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_says_something() {
        let (machine, moment) = (Machine::read(), Moment::read());
        assert!(machine.usable_cpus >= 1 && machine.kernel.is_some_and(|kernel| kernel.starts_with("Linux ")));
        assert!(moment.ticks.is_some_and(|ticks| ticks.busy >= ticks.own));
        assert!(moment.load.is_some() && moment.peak_memory.is_some_and(|bytes| bytes >= 1 << 20));
        assert!(resident_memory().is_some_and(|bytes| bytes >= 1 << 20));
    }
}
