package prober

import (
	"bytes"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/shirou/gopsutil/v4/host"
)

// Facts are what is known of a machine apart from its load. A fact that cannot be
// read is empty or zero. Strings are printable ASCII of at most 128 bytes: they
// come from files a board's owner can write.
type Facts struct {
	Hostname   string `json:"hostname,omitempty"`
	OS         string `json:"os,omitempty"`     // as it names itself: "Raspbian GNU/Linux 12 (bookworm)"
	Kernel     string `json:"kernel,omitempty"` // release, as uname -r
	Arch       string `json:"arch,omitempty"`   // of the machine, as uname -m; the binary's may be smaller
	Board      string `json:"board,omitempty"`  // model, from the device tree or DMI
	BootTimeMS int64  `json:"boot_time_ms,omitempty"`
}

// HostFacts reads the facts of this machine. It takes some file reads and runs no
// program; call it once, not for each status.
func HostFacts() Facts { return hostFacts("/") }

// hostFacts reads os and board below root, which ends in a slash.
func hostFacts(root string) Facts {
	// Not host.Info: it would run lsb_release, a script, on some boards.
	var f Facts
	f.Hostname, _ = os.Hostname()
	f.Kernel, _ = host.KernelVersion()
	f.Arch, _ = host.KernelArch()
	if boot, err := host.BootTime(); err == nil && boot < maxBytes/1000 {
		f.BootTimeMS = int64(boot) * 1000
	}
	f.OS = osName(root)
	f.Board = boardModel(root)
	for _, s := range []*string{&f.Hostname, &f.OS, &f.Kernel, &f.Arch, &f.Board} {
		*s = printable(*s)
	}
	return f
}

// osName is PRETTY_NAME of os-release(5), else the Go name of the system.
func osName(root string) string {
	for _, name := range []string{"etc/os-release", "usr/lib/os-release"} {
		b, err := readSmall(root+name, 16<<10)
		if err != nil {
			continue
		}
		for line := range bytes.Lines(b) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(string(line)), "PRETTY_NAME="); ok {
				return strings.Trim(v, `"'`)
			}
		}
	}
	return runtime.GOOS
}

// boardModel is the device tree's model on ARM and RISC-V boards, DMI's vendor
// and product elsewhere.
func boardModel(root string) string {
	if b, err := readSmall(root+"proc/device-tree/model", 4096); err == nil {
		return string(b)
	}
	vendor, _ := readSmall(root+"sys/class/dmi/id/sys_vendor", 4096)
	product, _ := readSmall(root+"sys/class/dmi/id/product_name", 4096)
	return strings.TrimSpace(string(vendor)) + " " + strings.TrimSpace(string(product))
}

// printable drops everything but printable ASCII, the NUL that ends a device tree
// string included.
func printable(s string) string {
	s = strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s))
	return s[:min(len(s), 128)]
}

// readSmall reads the first limit bytes of a file.
func readSmall(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}
