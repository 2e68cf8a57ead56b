package inspect

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// treeTimeMS is the time on the machine that tree returns: 2026-11-20.
const treeTimeMS = 1_795_132_800_000

// tree writes files below a new directory and returns a Machine that reads there.
func tree(t testing.TB, files map[string]string) *Machine {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m := New(Options{Root: root, Version: "1.2.3", Now: func() (int64, bool) { return treeTimeMS, true }, Synchronized: func() bool { return true }})
	m.usage.timeouts = [2]time.Duration{time.Minute, time.Minute} // a loaded machine is not a dead disk
	return m
}

// within is a context of the test that ends after d.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// Of several marks of engines the first one counts, in the order of systemd-detect-virt(1).
func TestVirtualizationMarks(t *testing.T) {
	m := tree(t, map[string]string{".dockerenv": "", "run/.containerenv": ""})
	for range 20 {
		if got := m.Info(within(t, 10*time.Second)).Virtualization; got != "podman" {
			t.Fatalf("got %q, want podman", got)
		}
	}
}

func TestInfo(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/sys/kernel/hostname": "attic\n",
		"proc/device-tree/model":   "Raspberry Pi 4 Model B Rev 1.4\x00",
		"etc/os-release":           "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n",
		"proc/cpuinfo":             "processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\n",
		"run/systemd/container":    "lxc\n",
		"proc/1/stat":              stat(1, "init", 0, 0, 0),
		"proc/22/stat":             "",
		"proc/self/stat":           "", // its name is not a process id
	})
	got := m.Info(within(t, 10*time.Second))
	for _, field := range []struct{ name, got, want string }{
		{"version", got.AgentVersion, "1.2.3"},
		{"host name", got.Hostname, "attic"},
		{"model", got.Model, "Raspberry Pi 4 Model B Rev 1.4"},
		{"OS", got.OS, "Debian GNU/Linux 12 (bookworm)"},
		{"CPU model", got.CPUModel, "ARMv7 Processor rev 3 (v7l)"},
		{"virtualization", got.Virtualization, "lxc"},
	} {
		if field.got != field.want {
			t.Errorf("%s is %q, want %q", field.name, field.got, field.want)
		}
	}
	if got.Processes != 2 || got.TimeMS != treeTimeMS || !*got.ClockSynchronized {
		t.Errorf("got %d processes, time %d, synchronized %v", got.Processes, got.TimeMS, *got.ClockSynchronized)
	}
	if got.MemTotalBytes == 0 || got.Kernel == "" || len(got.Unfinished) > 0 { // from system calls
		t.Errorf("got %+v, want memory, kernel and nothing unfinished", got)
	}
}

// Parts whose files are missing are unfinished where every machine has them.
func TestInfoWithoutFiles(t *testing.T) {
	got := tree(t, nil).Info(within(t, 10*time.Second))
	if want := []string{"cpu_model", "processes"}; !slices.Equal(got.Unfinished, want) {
		t.Errorf("unfinished is %q, want %q", got.Unfinished, want)
	}
}

// Text of the machine is shortened and cleaned, whatever the files contain.
func TestInfoCleansText(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/sys/kernel/hostname": strings.Repeat("ä", 1000),
		"proc/device-tree/model":   "a\x1b[31m\nb\xff",
		"etc/os-release":           "PRETTY_NAME=" + strings.Repeat("x", 70_000), // longer than a line may be
		"usr/lib/os-release":       "PRETTY_NAME='fallback'\n",
	})
	got := m.Info(within(t, 10*time.Second))
	if got.Hostname != strings.Repeat("ä", 253) {
		t.Errorf("host name is %q", got.Hostname)
	}
	if got.Model != "a [31m b\uFFFD" {
		t.Errorf("model is %q", got.Model)
	}
	if got.OS != "fallback" {
		t.Errorf("OS is %q, want that of the second file", got.OS)
	}
}

// A pipe in place of a file does not block the reader.
func TestInfoOfPipe(t *testing.T) {
	m := tree(t, map[string]string{"etc/x": ""})
	if err := unix.Mkfifo(m.path("etc/os-release"), 0o644); err != nil {
		t.Skip("no pipes here: ", err)
	}
	if got := m.Info(within(t, 10*time.Second)); got.OS != "" || slices.Contains(got.Unfinished, "os") {
		t.Errorf("OS is %q, unfinished %q", got.OS, got.Unfinished)
	}
}

// Whatever the kernel's files contain, parsers return values in range.
func FuzzParsers(f *testing.F) {
	f.Add(stat(7, "x", 1, 2, 3), "a b c")
	f.Add(mountinfo, route4)
	f.Add(route6, `\040\9`)
	f.Fuzz(func(t *testing.T, a, b string) {
		s, _, ok := parseStat([]byte(a), func(name []byte) bool { return len(name)%2 == 0 })
		if ok && (s.pid < 0 || s.ppid < 0 || s.threads < 0) {
			t.Errorf("%q: %+v", a, s)
		}
		for _, line := range strings.Split(a, "\n") {
			if mt, ok := parseMount([]byte(line)); ok && (mt.point == "" || mt.fsType == "") {
				t.Errorf("%q: %+v", line, mt)
			}
			for _, parse := range []func([]byte) (Route, bool){parseRoute4, parseRoute6} {
				if r, ok := parse([]byte(line)); ok && (r.Destination == "" || r.Destination == "invalid Prefix" || r.Metric < 0) {
					t.Errorf("%q: %+v", line, r)
				}
			}
		}
		if got := Text(b, 8); len([]rune(got)) > 8 || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' }) || strings.ToValidUTF8(got, "") != got {
			t.Errorf("Text(%q) = %q", b, got)
		}
	})
}
