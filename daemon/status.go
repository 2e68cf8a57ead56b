package daemon

import (
	"slices"
	"strings"
	"time"

	"agentctl/config"
	"agentctl/control"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// Status is the answer to status on the control socket (docs/control.md), which
// `agentctl status -o json` prints.
//
// Its JSON is read by scripts: fields are added, and neither renamed nor removed. Times with MS
// in the name are milliseconds since 1970, sizes are bytes.
type Status struct {
	NodeID         string         `json:"node_id"`
	Name           string         `json:"name"`
	Version        string         `json:"version"`
	UptimeS        int64          `json:"uptime_s"`
	Link           LinkStatus     `json:"link"`
	Clock          ClockStatus    `json:"clock"`
	Storage        StorageStatus  `json:"storage"`
	StateDir       StateDirStatus `json:"state_dir"`
	Sampling       SamplingStatus `json:"sampling"`
	Sample         *StatusSample  `json:"sample"` // null before the first one
	CloneSuspected bool           `json:"clone_suspected"`
	Drops          uint64         `json:"drops"` // messages to the relay that did not fit the send queue
	Config         *ConfigStatus  `json:"config,omitempty"`
	Join           *JoinStatus    `json:"join,omitempty"`
	Alerts         []alert.Event  `json:"alerts,omitempty"` // raised and not cleared
}

// LinkStatus is the state of the link to the relay. SinceMS is when the state began; without
// a relay it is the start of the daemon.
type LinkStatus struct {
	State     link.State `json:"state"`
	Relay     string     `json:"relay"`
	SinceMS   int64      `json:"since_ms"`
	NextTryMS int64      `json:"next_try_ms,omitempty"` // of the next dial; absent unless the daemon waits for it
	LastError *LinkError `json:"last_error"`
	// Counters since the daemon started.
	Reconnects uint64 `json:"reconnects"` // links that ended, and dials that failed
	Resumed    uint64 `json:"resumed"`    // links that continued the session before
	Expired    uint64 `json:"expired"`    // commands that arrived too late to be started
}

// States that a reader of a Status decides by.
const (
	LinkDisabled  = link.StateDisabled // no relay is configured
	LinkReady     = link.StateReady
	ClockUnsynced = clock.Unsynced // samples wait for their time
)

// LinkHint is the next step for a link that is down, in terms of configuration keys.
func (s *Status) LinkHint() string {
	l := link.Status{State: s.Link.State, CloneSuspected: s.CloneSuspected}
	if e := s.Link.LastError; e != nil {
		l.LastCode, l.LastErr = e.Code, e.Message
	}
	return linkHint(l, s.Join != nil && s.Join.State != JoinOverridden)
}

// LinkError is why a link ended or could not be opened.
type LinkError struct {
	Code    int    `json:"code"` // WebSocket close code; 0: none
	Message string `json:"message"`
	AtMS    int64  `json:"at_ms"`
}

// ClockStatus reports whether the daemon's time can be trusted, and its source.
type ClockStatus struct {
	State    clock.State `json:"state"`
	OffsetMS int64       `json:"offset_ms"` // between this machine and the relay
	NowMS    int64       `json:"now_ms"`    // the trusted time of this answer; 0: not known
}

// Values of StorageStatus.State.
const (
	storageOff      = "off"
	storageOK       = "ok"
	storageDegraded = "degraded:storage" // the disk fails, and new samples are in memory only
	// storageUnusable is a file that is not this program's, or of a newer version of it, or a fault
	// that a restart ends. The disk is fine, and new samples are in memory only.
	storageUnusable = "degraded:history"
)

// StorageStatus is the state of the history.
//
// Bytes and Rows are of the file, and Dropped counts since the start of the daemon.
type StorageStatus struct {
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"` // why it is degraded
	Path   string `json:"path"`             // of the file; the state directory without history
	Bytes  int64  `json:"bytes"`

	WrittenTodayBytes int64  `json:"written_today_bytes"` // since 0:00 UTC
	Rows              int64  `json:"rows"`
	Unsaved           int    `json:"unsaved"` // samples in memory only
	LastFlushMS       int64  `json:"last_flush_ms"`
	Dropped           uint64 `json:"dropped"`
	LastError         string `json:"last_error,omitempty"` // stays after the fault has ended
	LastErrorMS       int64  `json:"last_error_ms,omitempty"`
}

// Hint is the next step for a history that is not recorded.
func (s *StorageStatus) Hint() string {
	if s.State == storageUnusable {
		return "the disk is not at fault, and the file stays as it is: move " + s.Path + " away, or update agentctl if a newer one wrote it; recording then continues by itself"
	}
	return "free or repair the disk of " + s.Path + "; recording then continues by itself"
}

// SamplingStatus lists the modules that are sampled for local clients, and their errors.
type SamplingStatus struct {
	control.Sampling
	LastError    string               `json:"last_error,omitempty"` // why there is no sample
	DiskError    string               `json:"disk_error,omitempty"` // why the sample is without the disk
	ModuleStates []prober.ModuleState `json:"module_states,omitempty"`
}

// ConfigStatus lists the files from which the configuration was read.
type ConfigStatus struct {
	Files         []string `json:"files"`
	Error         string   `json:"error,omitempty"` // why the present files are not in force
	RestartNeeded []string `json:"restart_needed,omitempty"`
}

// StatusSample is the latest sample, as a metric frame whose disk may be missing.
type StatusSample struct {
	NodeID string `json:"node_id"`
	prober.Sample
	DiskPct *float64 `json:"disk_pct"` // null: not known, see SamplingStatus.DiskError
}

// status collects the answer from all parts. Each part is asked once, without a common
// lock, so that the figures may be of slightly different moments.
func (d *Daemon) status() *Status {
	c, view := d.config(), d.configView()
	s := &Status{
		NodeID: d.id.NodeID(), Name: c.Text("name"), Version: d.build.Version, UptimeS: int64(time.Since(d.start).Seconds()),
		Link:     LinkStatus{State: link.StateDisabled, Relay: d.relay(), SinceMS: wallMS(d.start)},
		Storage:  d.storageStatus(c),
		StateDir: d.stateDirStatus(),
		Sampling: SamplingStatus{Sampling: d.control.Sampling(), ModuleStates: d.device.prober.ModuleStates()},
		Config:   &ConfigStatus{Files: view.Files, Error: view.Error, RestartNeeded: view.Restart},
		Join:     d.joinStatus(),
		Alerts:   d.alerts.Active(),
	}
	if m := d.membership(); s.Name == "" && m.keeper != nil {
		s.Name = m.cred.Name
	}
	if client := d.device.link(); client != nil {
		l := client.Status()
		s.Link.State, s.Link.SinceMS = l.State, wallMS(l.Since)
		s.Link.Reconnects, s.Link.Resumed, s.Link.Expired = l.Reconnects, l.Resumed, l.Expired
		if !l.NextTry.IsZero() { // by the monotonic clock: the wall clock may have jumped since
			s.Link.NextTryMS = time.Now().Add(max(time.Until(l.NextTry), 0)).UnixMilli()
		}
		s.CloneSuspected, s.Drops = l.CloneSuspected, l.Drops
		if l.LastErr != "" {
			s.Link.LastError = &LinkError{Code: l.LastCode, Message: l.LastErr, AtMS: wallMS(l.LastErrAt)}
		}
	}
	s.Clock.State, s.Clock.OffsetMS = d.device.clock.State()
	if ms, ok := d.device.clock.NowMS(); ok {
		s.Clock.NowMS = ms
	}
	sample, err := d.device.prober.Latest()
	if err != nil {
		s.Sampling.LastError = err.Error()
		return s
	}
	s.Sample = &StatusSample{s.NodeID, sample, &sample.DiskPct}
	if sample.DiskErr != nil {
		s.Sample.DiskPct, s.Sampling.DiskError = nil, sample.DiskErr.Error()
	}
	return s
}

// storageStatus is off without a history, and while the configuration disables it.
func (d *Daemon) storageStatus(c *config.Config) StorageStatus {
	if d.history == nil {
		return StorageStatus{State: storageOff, Path: c.Text("state_dir")}
	}
	h := d.history.Stats()
	s := StorageStatus{State: storageOK, Path: h.Path, Bytes: h.Bytes, WrittenTodayBytes: h.WrittenToday, Rows: h.Rows,
		Unsaved: h.Unsaved, LastFlushMS: h.LastFlushMS, Dropped: h.Dropped, LastError: h.LastError, LastErrorMS: h.LastErrorMS}
	switch {
	case !d.historyEnabled.Load():
		s.State = storageOff
	case h.State != "ok":
		s.State = storageDegraded
		s.Detail = strings.TrimPrefix(h.State, "degraded:")
		if slices.Contains([]string{"newer", "foreign", "fault"}, s.Detail) {
			s.State = storageUnusable
		}
		if h.LastError != "" {
			s.Detail += ": " + h.LastError
		}
	}
	return s
}
