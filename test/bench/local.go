//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// What local users of a board observe: how soon the daemon has a sample, and that none of
// them can blow it up. docs/control.md is the protocol.

func (b *bench) boardState() string  { return filepath.Join(b.dir, "board") }
func (b *bench) boardSocket() string { return filepath.Join(b.dir, "board.sock") }

// framed is a message to the control socket.
func framed(body string) string {
	return fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
}

var (
	helloMessage    = framed(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"bench","protocol_version":1,"token":"bench"}}`)
	snapshotMessage = framed(`{"jsonrpc":"2.0","id":2,"method":"snapshot"}`)
	historyMessage  = framed(`{"jsonrpc":"2.0","id":3,"method":"query_history","params":{"from_ts":1,"to_ts":0}}`)
)

// askBoard takes a sample from a daemon's control socket.
func askBoard(path string) error {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, helloMessage+snapshotMessage); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	for range 2 {
		var length int
		head, _ := r.ReadString('\n')
		blank, err := r.ReadString('\n')
		if _, badHead := fmt.Sscanf(head, "Content-Length: %d", &length); badHead != nil || blank != "\r\n" || length > 1<<20 {
			return fmt.Errorf("control socket: not a message: %q: %w", head, errors.Join(err, badHead))
		}
		body := make([]byte, length)
		if _, err := io.ReadFull(r, body); err != nil {
			return err
		}
		if bytes.Contains(body, []byte(`"id":2`)) && !bytes.Contains(body, []byte(`"usage_percent"`)) {
			return fmt.Errorf("control socket: no sample in %s", body)
		}
	}
	return nil
}

// isRecording reports whether the board's history was committed in the last windows.
func (b *bench) isRecording() error {
	var newest time.Time
	for _, name := range []string{"history.db", "history.db-wal"} {
		st, err := os.Stat(filepath.Join(b.boardState(), name))
		if err != nil {
			return err
		}
		if st.ModTime().After(newest) {
			newest = st.ModTime()
		}
	}
	if age := time.Since(newest); age > 3*b.daemon {
		return fmt.Errorf("the board's history had its last commit %s ago", age.Round(time.Second))
	}
	return nil
}

// firstSampleBar is the time from exec to the answer that has the first sample, with a
// state directory that has a history already.
func (b *bench) firstSampleBar() error {
	dir := filepath.Join(b.dir, "first")
	socket := filepath.Join(b.dir, "first.sock")
	var took []float64
	for range 3*b.count + 1 {
		begin := time.Now()
		p, _, err := start(20*time.Second, isReady, b.board, "run", "--state-dir", dir, "--socket", socket)
		if err != nil {
			return err
		}
		err = askBoard(socket)
		took = append(took, time.Since(begin).Seconds()*1000)
		p.stop()
		if err != nil {
			return err
		}
	}
	took = took[1:] // it made the directory and the file
	fmt.Printf("exec to first sample: %s ms\n", list(took, "%.0f"))
	b.report.add(bar{name: "device daemon: exec to first sample", measured: median(took), required: 60, format: "%.0f ms"})
	return nil
}

// hostileBar is the peak growth of the daemon's memory while local clients, which
// are let in, send it everything but sense and leave the answers unread.
func (b *bench) hostileBar(agent *process) error {
	path := b.boardSocket()
	// Linux then counts VmHWM, the highest VmRSS, from here on.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", agent.pid()), []byte("5"), 0); err != nil {
		return err
	}
	before := agent.memory("VmRSS")

	for range 1000 {
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			_ = c.Close()
		}
	}
	mib := strings.Repeat("x", 1<<20)
	list := `{"jsonrpc":"2.0","id":4,"method":"start","params":{"modules":[` + strings.Repeat(`"cpu",`, 170_000) + `"cpu"]}}`
	for _, attack := range []struct {
		name  string
		first string // sent once
		again string // 64 times
	}{
		{"a header line without an end", "", mib},
		{"header lines without an end", "", strings.Repeat("X: y\r\n", 1<<17)},
		{"a length that nobody has", "Content-Length: 99999999999\r\n\r\n", mib},
		{"long messages, not finished", "Content-Length: 1048576\r\n\r\n" + mib[1:], ""},
		{"long messages", helloMessage, framed(list)},
		{"deep ones", helloMessage, framed(strings.Repeat("[", 1<<20))},
		{"answers unread", helloMessage, strings.Repeat(snapshotMessage, 1000)},
		{"long answers unread", helloMessage, strings.Repeat(historyMessage, 20)},
	} {
		var wg sync.WaitGroup
		for range 20 { // 16 are let in at a time
			wg.Go(func() { attackSocket(path, attack.first, attack.again) })
		}
		wg.Wait()
		fmt.Printf("hostile: %-28s highest RSS so far +%.1f MB\n", attack.name, (agent.memory("VmHWM")-before)*1024/1e6)
		if !agent.alive() {
			return errors.New("the daemon did not survive " + attack.name)
		}
	}
	rose := (agent.memory("VmHWM") - before) * 1024 / 1e6
	var err error
	for range 20 { // the last of them may not be gone yet
		if err = askBoard(path); err == nil {
			break
		}
		b.sleep(500 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("after hostile clients: %w", err)
	}
	b.report.add(bar{name: "device daemon: RSS that hostile local clients cost, at the highest", measured: rose, required: 8, format: "%.1f MB"})
	return nil
}

// attackSocket is one hostile client. It ends when it is hung up on, or after five seconds.
func attackSocket(path, first, again string) {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, first); err != nil {
		return
	}
	for range 64 {
		if _, err := io.WriteString(c, again); err != nil {
			return
		}
		if again == "" {
			time.Sleep(50 * time.Millisecond)
		}
	}
}
