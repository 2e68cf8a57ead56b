//go:build linux

package eventscmd

import (
	"bufio"
	"fmt"
	"os"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"agentctl/client"
)

// openTerminal returns the two ends of a new terminal. What is written to tty can be read from screen.
func openTerminal(t *testing.T) (screen, tty *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no terminal: %v", err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	fd := int(screen.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no terminal: %v", err)
	}
	t.Cleanup(func() { _ = tty.Close() })
	return screen, tty
}

// With -o ndjson on a terminal an event cannot act on it either; elsewhere its bytes are kept.
func TestPrintEventTerminal(t *testing.T) {
	screen, tty := openTerminal(t)
	cmd := &cobra.Command{}
	cmd.SetOut(tty)
	if err := printEvent(cmd, client.Event{ID: "5", Topic: "a", Data: []byte("\"\u009b2J \u202e <é>\"")}, false); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(screen).ReadString('\n')
	if want := `{"id":5,"topic":"a","data":"\u009b2J \u202e <é>"}` + "\r\n"; err != nil || line != want {
		t.Errorf("printed %q, %v; want %q", line, err, want)
	}
}
