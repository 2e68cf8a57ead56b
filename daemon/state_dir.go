package daemon

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/prober/history"
	"agentctl/statedir"
	"agentctl/transport/enroll"
)

// openStateDir reads the identity and locks the state directory. Nothing that is in the directory,
// and no fault of its disk, keeps the board from starting.
func (d *Daemon) openStateDir(stateDir string) error {
	if d.cfg.Damage != nil {
		d.damage = append(d.damage, d.cfg.Damage)
	}
	id, err := statedir.Do(d.disk, func() (*enroll.Identity, error) { return enroll.Load(stateDir) })
	switch {
	case errors.Is(err, statedir.ErrHung):
		id, err = enroll.Unread(stateDir, err), nil
	case errors.Is(err, enroll.ErrNotSaved):
		d.log.Error("state directory: running from memory, will retry the disk", zap.Error(err), zap.String("hint", "agentctl doctor"))
	case err != nil:
		return err
	}
	d.id = id
	if damage := id.Damage(); damage != nil {
		d.damage = append(d.damage, damage)
	}
	for _, damage := range d.damage {
		d.log.Error("a damaged file of the state directory", zap.Error(damage), zap.String("node_id", id.NodeID()), zap.String("hint", "agentctl doctor"))
	}
	unlock, err := statedir.Do(d.disk, func() (func(), error) { return enroll.Lock(stateDir) })
	var used *enroll.InUseError
	if errors.As(err, &used) {
		return err
	} else if err != nil {
		d.log.Warn("a second daemon with this state directory would not be noticed", zap.Error(err))
	}
	d.unlock = unlock
	removed, err := statedir.Do(d.disk, func() (int, error) { return atomicfile.RemoveStale(stateDir) })
	if removed > 0 || err != nil {
		d.log.Info("removed temporary files that a power cut left behind", zap.Int("files", removed), zap.Error(err))
	}
	return nil
}

// isUnused reports whether a file of the state directory is not used and still in its place.
func (d *Daemon) isUnused(name string) bool {
	return slices.ContainsFunc(d.damages(), func(damage *atomicfile.Damage) bool {
		return damage.Aside == "" && filepath.Base(damage.Path) == name
	})
}

// forgetUnused ends the report of a file that was not used, because it is now.
func (d *Daemon) forgetUnused(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.damage = slices.DeleteFunc(slices.Clone(d.damage), func(damage *atomicfile.Damage) bool {
		return damage.Aside == "" && filepath.Base(damage.Path) == name
	})
}

// damages returns the files that could not be used. The caller does not change the slice.
func (d *Daemon) damages() []*atomicfile.Damage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.damage
}

// setNode stores the node that a relay assigned, and reports whether it is another one than before.
func (d *Daemon) setNode(nodeID, tenant string) (changed bool) {
	changed, isSame := d.id.Assign(nodeID, tenant)
	if isSame {
		return false
	}
	if _, err := statedir.Do(d.disk, func() (struct{}, error) { return struct{}{}, d.id.Save() }); err != nil {
		d.log.Warn("the node id could not be saved", zap.Error(err))
	}
	return changed
}

// Faults of the history that a disk causes, and that can end while the daemon runs.
var historyDiskFaults = []string{"degraded:full", "degraded:read-only", "degraded:io", "degraded:busy"}

// pollStateDir probes the state directory, logs when its state changes, and makes the history try
// a disk again that works. last is the state that was logged; pollStateDir returns the next one.
func (d *Daemon) pollStateDir(last statedir.State) statedir.State {
	isSuspect := d.history != nil && slices.Contains(historyDiskFaults, d.history.Stats().State)
	d.disk.Poll(isSuspect)
	s := d.disk.Status()
	if isSuspect && s.State == statedir.OK {
		d.history.Retry()
	}
	switch {
	case s.State == last:
	case s.State == statedir.OK:
		d.log.Info("the disk of the state directory works again")
	default:
		d.log.Error("the disk of the state directory", zap.String("state", string(s.State)), zap.String("detail", s.Detail), zap.String("hint", "agentctl doctor"))
	}
	return s.State
}

// StateDirStatus is the state of the disk that the state directory is on, and of the files in it
// that could not be used.
//
// SetAside has an entry for each such file for as long as it is in the directory: to acknowledge
// one, a person moves or removes it.
type StateDirStatus struct {
	Path      string         `json:"path"`
	State     statedir.State `json:"state"`            // ok, full, read-only, failing, hung
	Detail    string         `json:"detail,omitempty"` // of a state other than ok
	SinceMS   int64          `json:"since_ms"`         // when the state began, or the daemon started
	FreeBytes uint64         `json:"free_bytes"`       // that the daemon can write; 0 before the first probe
	SetAside  []SetAsideFile `json:"set_aside,omitempty"`
}

// SetAsideFile is a damaged file.
type SetAsideFile struct {
	File    string `json:"file"`              // in the state directory, that could not be used
	Aside   string `json:"aside,omitempty"`   // its present name; absent: it is where it was
	Problem string `json:"problem,omitempty"` // absent when an earlier daemon found it
}

// IsOK reports whether the disk works. An older daemon does not say.
func (s *StateDirStatus) IsOK() bool { return s.State == statedir.OK || s.State == "" }

// Hint is the next step for a disk that does not work.
func (s *StateDirStatus) Hint() string {
	switch s.State {
	case statedir.Full:
		return "free some space: journalctl --vacuum-size=50M, apt-get clean; the daemon goes on by itself"
	case statedir.ReadOnly:
		return "a card that fails turns read-only: see dmesg, then: sudo mount -o remount,rw MOUNTPOINT; or is the directory another user's? ls -ld " + s.Path
	}
	return "see dmesg; back the card up and replace it. Sampling, link and socket go on without it"
}

// Text says what is known of a damaged file.
func (f *SetAsideFile) Text() string {
	text := f.File + " was damaged, and set aside as " + f.Aside
	if f.Aside == "" {
		text = f.File + " is not used, and stays as it is"
	}
	if f.Problem != "" {
		text += ": " + f.Problem
	}
	return text
}

// SetAsideHint is the next step for damaged files. They are listed for as long as they are there.
func (s *StateDirStatus) SetAsideHint() string {
	for _, f := range s.SetAside {
		if f.Aside == "" {
			return "give it to the daemon's user, then restart the daemon: sudo chown --reference=" + s.Path + " " + filepath.Join(s.Path, f.File)
		}
	}
	return "take from it what you need, then remove it: sudo rm " + filepath.Join(s.Path, s.SetAside[0].Aside)
}

// stateDirStatus collects StateDirStatus without access to the disk.
func (d *Daemon) stateDirStatus() StateDirStatus {
	disk, damages := d.disk.Status(), d.damages()
	s := StateDirStatus{Path: d.disk.Dir(), State: disk.State, Detail: disk.Detail, FreeBytes: disk.FreeBytes, SinceMS: wallMS(disk.Since)}
	for _, name := range disk.Damaged {
		file := SetAsideFile{Aside: name}
		file.File, _, _ = strings.Cut(name, atomicfile.AsideMark)
		file.File, _, _ = strings.Cut(file.File, history.AsideMark)
		for _, damage := range damages {
			if filepath.Base(damage.Aside) == name {
				file.Problem = damage.Problem
			}
		}
		s.SetAside = append(s.SetAside, file)
	}
	for _, damage := range damages {
		if damage.Aside == "" {
			s.SetAside = append(s.SetAside, SetAsideFile{File: filepath.Base(damage.Path), Problem: damage.Problem})
		}
	}
	return s
}

// wallMS is a moment of the monotonic clock by the wall clock of now, which may have jumped since.
func wallMS(t time.Time) int64 { return time.Now().Add(-time.Since(t)).UnixMilli() }
