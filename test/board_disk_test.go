package test

import (
	"encoding/json"
	"path/filepath"
	"testing"
	"time"

	"agentctl/test/faultdisk"
)

// diskBoard is a board whose state directory is on a disk that fails on command.
type diskBoard struct {
	*diskRelay
	state, socket string
	board         *process
}

// boardStatus is what these tests read of `agentctl status -o json`.
type boardStatus struct {
	NodeID   string `json:"node_id"`
	Name     string `json:"name"`
	Link     struct{ State string }
	Storage  struct{ State string }
	StateDir struct {
		State    string
		SetAside []struct{ File, Aside string } `json:"set_aside"`
	} `json:"state_dir"`
}

func (b *diskBoard) start() {
	b.board = startProcess(b.t, nil, binary(b.t, "agentctl", ""), "run", "--state-dir", b.state, "--socket", b.socket)
	b.board.waitOutput(`"ready"`)
}

func (b *diskBoard) status() (s boardStatus) {
	out, _, _ := b.command("status", "-o", "json", "--socket", b.socket)
	_ = json.Unmarshal([]byte(out), &s)
	return s
}

// isSound reports whether all is as before the faults.
func (b *diskBoard) isSound(node, name string) func() bool {
	return func() bool {
		s := b.status()
		return s.NodeID == node && s.Name == name && s.Link.State == "ready" && s.Storage.State == "ok" &&
			s.StateDir.State == "ok" && len(s.StateDir.SetAside) == 0
	}
}

// TestDiskOfBoardReal: whatever the disk of a board does, while it runs and when it starts, the board
// is up and says so within 10 s, and is as before within 10 s of the end.
func TestDiskOfBoardReal(t *testing.T) {
	skipUnlessSlow(t)
	b := &diskBoard{diskRelay: newDiskRelay(t), socket: filepath.Join(t.TempDir(), "s")}
	disk := faultdisk.New(t) // another one than the relay's
	b.state = filepath.Join(disk.Dir, "state")
	b.start()
	out, _, _ := b.diskRelay.command("invite", "-o", "json", "--state-dir", b.dir)
	var invite struct{ Code string }
	if err := json.Unmarshal([]byte(out), &invite); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"join", b.url, invite.Code}, {"config", "set", "name", "porch"}, {"config", "set", "history.flush", "3s"}} {
		if _, errs, code := b.command(append(args, "--socket", b.socket)...); code != 0 {
			t.Fatalf("%v: %s", args, errs)
		}
	}
	node := b.status().NodeID
	b.await("a sound board", b.isSound(node, "porch"))
	for _, c := range []struct {
		fault []string
		state string
	}{
		{[]string{"full", "0"}, "full"},
		{[]string{"readonly"}, "read-only"},
		{[]string{"fail", "read", "*", "EIO"}, "failing"},
		{[]string{"fail", "rename", "*", "EIO"}, "failing"},
		{[]string{"hang", "any", "*"}, "hung"},
	} {
		for _, atStart := range []bool{false, true} {
			what := c.fault[0] + " " + c.state
			if atStart {
				what += " at the start"
				b.board.stop()
			}
			disk.Fault(c.fault...)
			began := time.Now()
			if atStart {
				b.start()
				if d := time.Since(began); d > patience/2 {
					t.Errorf("%s: up after %v", what, d)
				}
			}
			b.await(what+" in status", func() bool { return b.status().StateDir.State == c.state })
			if !atStart && b.status().Link.State != "ready" {
				t.Errorf("%s: no link", what)
			}
			if _, errs, code := b.command("doctor", "--socket", b.socket); code != 1 {
				t.Errorf("%s: doctor exits with %d: %s", what, code, errs)
			}
			if _, errs, code := b.command("config", "set", "name", "other", "--socket", b.socket); code != 1 {
				t.Errorf("%s: config set exits with %d: %s", what, code, errs)
			}
			disk.Clear()
			b.await("the end of: "+what, b.isSound(node, "porch"))
		}
	}
}
