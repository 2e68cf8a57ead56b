package journal

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestMain runs the tests, or acts as journalctl: under the name of a scenario, because the helper
// starts it with an empty environment.
func TestMain(m *testing.M) {
	if scenario, ok := strings.CutPrefix(filepath.Base(os.Args[0]), "journalctl-"); ok {
		// os.Exit would wait for the race detector's atexit_sleep_ms: a second, since the
		// helper passes no GORACE.
		syscall.Exit(scenarios[scenario]())
	}
	os.Exit(m.Run())
}

// journalctl returns a program that acts out a scenario.
func journalctl(t *testing.T, scenario string) string {
	t.Helper()
	if scenarios[scenario] == nil {
		t.Fatalf("no scenario %s", scenario)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "journalctl-"+scenario)
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// testCursor is the cursor of the n-th entry.
func testCursor(n int) string {
	return fmt.Sprintf("s=0123456789abcdef0123456789abcdef;i=%x;b=fedcba9876543210fedcba9876543210;m=%x;t=%x;x=%x", n+1, n+1, int64(1893456000000000)-int64(n), n+1)
}

// testEntry is the n-th entry, newest first. message is JSON.
func testEntry(n int, message string) string {
	return fmt.Sprintf(`{"__CURSOR":"%s","__REALTIME_TIMESTAMP":"%d","__MONOTONIC_TIMESTAMP":"1","_BOOT_ID":"x","PRIORITY":"3","SYSLOG_IDENTIFIER":"app","_PID":"%d","_SYSTEMD_UNIT":"app.service","MESSAGE":%s}`,
		testCursor(n), int64(1893456000000000)-int64(n)*1000, 100+n, message)
}

var scenarios = map[string]func() int{
	"ten": func() int {
		first := 0
		for _, a := range os.Args[1:] { // a cursor leads to the entry behind it
			if c, ok := strings.CutPrefix(a, "--after-cursor="); ok {
				for testCursor(first) != c {
					first++
				}
				first++
			}
		}
		for n := first; n < 10; n++ {
			fmt.Println(testEntry(n, fmt.Sprintf(`"line %d password=hunter%d"`, n, n)))
		}
		return 0
	},
	"none": func() int { return 0 },
	// The arguments as lines.
	"arguments": func() int {
		for n, a := range append(os.Args[1:], os.Environ()...) {
			fmt.Println(testEntry(n, fmt.Sprintf("%q", a)))
		}
		return 0
	},
	// Gigabytes of lines.
	"endless": func() int {
		line := testEntry(0, `"the same line again"`) + "\n"
		block := []byte(strings.Repeat(line, 256))
		for {
			if _, err := os.Stdout.Write(block); err != nil {
				return 1
			}
		}
	},
	// Nothing, and a child that holds the pipe.
	"hanging": func() int {
		fmt.Println(testEntry(0, `"one line"`))
		child := exec.Command("/bin/sleep", "1000")
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		_ = child.Start()
		_ = os.WriteFile(filepath.Join(filepath.Dir(os.Args[0]), "child"), []byte(fmt.Sprint(child.Process.Pid)), 0o600)
		select {} // until it is killed
	},
	"hugeline": func() int {
		fmt.Print(testEntry(0, `"begin `+strings.Repeat("x", 2<<20)+`"`) + "\n")
		fmt.Print(testEntry(1, `[`+strings.Repeat("120,", 1<<17)+`120]`) + "\n")
		fmt.Println(testEntry(2, `"after it"`))
		return 0
	},
	"binary": func() int {
		fmt.Println(testEntry(0, `[104,105,255,0,33]`))
		fmt.Println(testEntry(1, `["first","second"]`))
		fmt.Println(testEntry(2, `[[104,105],"text"]`))
		fmt.Println(testEntry(3, `null`))
		fmt.Println(testEntry(4, `"tab\t\u0000 \u202e end"`))
		return 0
	},
	"garbage": func() int {
		fmt.Println("-- No entries --")
		fmt.Println(`{"__CURSOR":7,"MESSAGE":{"a":[1,{}]}}`)
		fmt.Println(strings.Repeat("[", 100000))
		fmt.Println(testEntry(0, `"fine"`))
		fmt.Print(`{"__CURSOR":"` + testCursor(1) + `","MESSAGE":"cut of`)
		return 0
	},
	"escapes": func() int {
		for n := range 20 { // a page holds two
			fmt.Println(testEntry(n, `"`+strings.Repeat(`\u0001`, 9000)+`"`))
		}
		return 0
	},
	"nocursor": func() int {
		fmt.Fprintln(os.Stderr, "Failed to seek to cursor: Invalid argument")
		return 1
	},
	"forbidden": func() int {
		fmt.Fprintln(os.Stderr, strings.Repeat("no ", 10000)+"insufficient permissions")
		return 1
	},
	"crash": func() int {
		fmt.Println(testEntry(0, `"one line"`))
		_ = os.Stdout.Sync()
		p, _ := os.FindProcess(os.Getpid())
		_ = p.Kill()
		select {}
	},
}
