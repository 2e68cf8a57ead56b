// Package history records samples on the board's disk, usually an SD card: committed in
// batches, bounded by retention, queried in steps.
//
// A Store collects samples in memory and commits them to an SQLite file every minute,
// because each commit costs flash far more than the bytes it holds:
//
//	s, err := history.Open(history.Options{Path: "/var/lib/agentctl/history.db", Now: clock.NowMS})
//	go s.Record(ctx, p)                // samples of prober p until ctx ends, then a last commit
//	err = s.Query(ctx, history.Query{FromMS: f, StepMS: 60_000}, fn)
//	err = s.Close()
//
// A query merges the file and what is not committed yet, without gap or repetition. Of
// several samples with the same millisecond the first is kept.
//
// # On disk
//
// The file is an SQLite database in WAL mode; the schema is in sqlite.go. Samples are rows
// of integers, a row each, by time. Readings of optional modules are rows (time and key,
// value), recorded every ten seconds and only when the module was read since. Rows whose
// time is not known yet have negative times and move when it is (encoding.go). Other
// programs may read the file while it is written:
//
//	sqlite3 history.db 'SELECT * FROM metrics ORDER BY ts DESC LIMIT 5'
//
// flush.go explains when samples are committed, retention.go when they are removed.
//
// # Faults
//
// When the disk is full, read-only, corrupt or gone, the Store continues from memory, shows
// it in Stats, and records again once it can. A corrupt file is renamed and a new one begun
// (disk_faults.go).
//
// # Locks
//
// Store.diskToken is a channel with one token; its holder may use the file, and waits for
// the disk. Store.mu protects memory and is held for memory work only. Whoever needs both
// takes diskToken first. Add takes mu alone, so it never waits for the disk.
package history

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/prober"
)

// Bounds and defaults of the options.
const (
	// A commit writes several pages of 4 KiB, however few samples it has, so the flush
	// interval decides how much the card wears; samples of one interval are lost in a power
	// cut. A minute costs at most 75 MB a day (TestWear).
	DefaultFlush = 60 * time.Second
	MinFlush     = time.Second
	MaxFlush     = time.Hour

	DefaultMaxAge = 30 * 24 * time.Hour
	MinMaxAge     = time.Minute

	// DefaultMaxBytes and MinMaxBytes include the WAL and its index (walReserve).
	DefaultMaxBytes = 64_000_000
	MinMaxBytes     = 2_000_000
)

const (
	// maxUnsaved bounds the samples in memory: an hour and 20 minutes of one a second.
	maxUnsaved = 4800
	// flushAtSamples is how many unsaved samples make a flush come early. It leaves space for 18
	// minutes of one a second, in which a disk that is busy may answer again.
	flushAtSamples = 3700
	// maxUnsavedReadings bounds the readings in memory (24 bytes each).
	maxUnsavedReadings = 4 * maxUnsaved
	// flushAtReadings is the same for readings.
	flushAtReadings = maxUnsavedReadings * 3 / 4
	// diskTimeout bounds the wait for a disk that does not answer.
	diskTimeout = 10 * time.Second
)

// Errors that callers test for.
var (
	ErrClosed = errors.New("history: closed")
	ErrRange  = errors.New("history: the window ends before it begins")
	ErrBusy   = errors.New("history: the disk has not answered yet, ask again")
)

// Options configure a Store. Path is required.
type Options struct {
	Path string // the database file; its directory is made when missing
	// Flush is how often samples are committed, MinFlush..MaxFlush; default DefaultFlush.
	Flush time.Duration
	// MaxAge hides and removes older samples, by the uptime that was recorded since (uptime.go);
	// default DefaultMaxAge.
	MaxAge time.Duration
	// MaxBytes bounds the file: beyond it the oldest samples are removed; default
	// DefaultMaxBytes.
	MaxBytes int64
	Logger   *zap.Logger // default none

	// Now is the trusted wall clock, milliseconds since 1970; not ok while the time is
	// unknown. Default the system's, trusted from prober.MinTSMS on.
	Now func() (ms int64, ok bool)

	// BootID names the current boot, and Mono is a clock that counts from its start.
	// Samples taken while the time is unknown are recorded with them, and get their time
	// once it is known in the same boot. The defaults are the kernel's, so that a restart
	// of the process loses nothing.
	BootID string
	Mono   func() time.Duration
}

// Store is a history. Its methods may be called at any time from any goroutine.
type Store struct {
	path   string
	bootID string
	mono   func() time.Duration
	now    func() (int64, bool)
	log    *zap.Logger
	wake   chan struct{} // buffers one: the flusher has something to do

	// diskToken holds one token while the file is free. The holder may use db, fatalErr and spanAt.
	diskToken chan struct{}
	db        *db // nil when not open
	// fatalErr is set when this process must not touch the file again.
	fatalErr error
	// spanAt is until when the file's last span reaches, by mono, in milliseconds.
	spanAt int64

	mu       sync.Mutex // protects the fields below
	closed   bool
	flush    time.Duration
	maxAge   time.Duration
	maxBytes int64
	// purgePending is set by SetRetention, for the next flush to apply it in full.
	purgePending bool
	// flushRequested makes the flusher flush now.
	flushRequested bool
	isPaused       bool
	// restartWatch ends the current Watch; nil while there is none.
	restartWatch context.CancelFunc

	// samples by time and readings by readingID are unsaved. seq is the order of arrival of
	// the newest item in both, by which a flush knows what it has saved.
	samples  buffer[values]
	readings buffer[int64]
	seq      uint64
	// latest is the newest sample, saved or not, and latestID its id, 0 when there is none.
	latest   prober.Sample
	latestID int64
	// hasUndated is set when there may be samples whose time is not known.
	hasUndated bool

	// fault is why the disk cannot be used, empty when it can.
	fault string
	// lockedSince is when diskToken was taken, zero while it is free.
	lockedSince time.Time
	stats       Stats
	// statsDay is the day of stats.WrittenToday, in days since 1970.
	statsDay int64
}

// Open returns a Store. It fails only for invalid options: the file is opened when it is
// first needed, and Stats shows when it cannot be used.
func Open(o Options) (*Store, error) {
	if o.Path == "" {
		return nil, errors.New("history: no path given")
	}
	path, err := filepath.Abs(o.Path)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	s := &Store{
		path:      path,
		bootID:    o.BootID,
		mono:      o.Mono,
		now:       o.Now,
		log:       cmp.Or(o.Logger, zap.NewNop()),
		wake:      make(chan struct{}, 1),
		diskToken: make(chan struct{}, 1),
		flush:     DefaultFlush,
		maxAge:    DefaultMaxAge,
		maxBytes:  DefaultMaxBytes,
		samples:   buffer[values]{max: maxUnsaved},
		readings:  buffer[int64]{max: maxUnsavedReadings},
	}
	s.diskToken <- struct{}{}
	if s.bootID == "" {
		s.bootID = kernelBootID()
	}
	if s.mono == nil {
		s.mono = kernelClock
	}
	s.spanAt = s.mono().Milliseconds()
	if s.now == nil {
		s.now = func() (int64, bool) {
			ms := time.Now().UnixMilli()
			return ms, ms >= prober.MinTSMS
		}
	}
	if o.Flush != 0 {
		if err := s.SetFlush(o.Flush); err != nil {
			return nil, err
		}
	}
	if o.MaxAge != 0 || o.MaxBytes != 0 {
		if err := s.SetRetention(o.MaxAge, o.MaxBytes); err != nil {
			return nil, err
		}
		s.purgePending = false // bounds that held before the start are applied in small steps
	}
	// SetRetention has requested a flush, which would open the file while the daemon starts (openDelay).
	s.flushRequested = false
	return s, nil
}

// SetFlush changes how often samples are committed, MinFlush..MaxFlush.
func (s *Store) SetFlush(d time.Duration) error {
	if d < MinFlush || d > MaxFlush {
		return fmt.Errorf("history: flush interval %v is outside %v..%v", d, MinFlush, MaxFlush)
	}
	s.mu.Lock()
	s.flush = d
	s.mu.Unlock()
	s.wakeFlusher()
	return nil
}

// SetRetention changes how old samples may get (at least MinMaxAge) and how large the
// file (at least MinMaxBytes); zero means the default. The next flush comes at once, removes
// what is beyond and shrinks the file.
func (s *Store) SetRetention(age time.Duration, bytes int64) error {
	age, bytes = cmp.Or(age, DefaultMaxAge), cmp.Or(bytes, DefaultMaxBytes)
	if age < MinMaxAge {
		return fmt.Errorf("history: retention of %v is below %v", age, MinMaxAge)
	}
	if bytes < MinMaxBytes {
		return fmt.Errorf("history: retention of %d bytes is below %d", bytes, MinMaxBytes)
	}
	s.mu.Lock()
	s.maxAge, s.maxBytes, s.purgePending, s.flushRequested = age, bytes, true, true
	s.mu.Unlock()
	s.wakeFlusher()
	return nil
}

// SetRecording enables or disables the recording of samples; it is enabled at first. Samples
// that are in memory already are still committed.
func (s *Store) SetRecording(on bool) {
	s.mu.Lock()
	s.isPaused = !on
	if s.restartWatch != nil {
		s.restartWatch()
	}
	s.mu.Unlock()
}

// Add records a sample and readings of optional modules, in memory at first. It never waits
// for the disk: when memory is full the oldest unsaved item is dropped and counted. A sample
// that prober.Sample.Check refuses is dropped and counted, with its readings, unless the
// time or the disk is what it lacks.
//
// A reading's value is kept to three decimals. One with an unknown key, or whose value is
// not a number, is dropped and counted.
func (s *Store) Add(x prober.Sample, readings ...prober.Reading) {
	v, err := valuesOf(&x)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if err != nil {
		s.stats.Dropped += 1 + uint64(len(readings))
		return
	}
	id := x.TSMS
	if id < prober.MinTSMS {
		id = undatedID(memorySlot, s.mono()) // it came without a time
	}
	s.latest, s.latestID = x, id
	s.latest.Modules = nil
	s.seq++
	s.countLocked(s.samples.add(id, v, s.seq))
	for _, r := range readings {
		s.addReadingLocked(id, r)
	}
	if len(s.samples.items) >= flushAtSamples || len(s.readings.items) >= flushAtReadings || s.hasUndated && id > 0 {
		s.requestFlushLocked() // much is unsaved, or the time is known now
	}
	s.hasUndated = s.hasUndated || id < 0
}

// addReadingLocked adds one reading of the sample with this id.
func (s *Store) addReadingLocked(id int64, r prober.Reading) {
	v, ok := milli(r.Value)
	k := idOf[r.Key]
	if !ok || k == 0 {
		s.stats.Dropped++
		return
	}
	s.countLocked(s.readings.add(readingID(id, k), v, s.seq))
}

// countLocked counts what buffer.add returned.
func (s *Store) countLocked(dropped, repeated bool) {
	if dropped {
		s.stats.Dropped++
	}
	if repeated {
		s.stats.Repeated++
	}
}

// requestFlushLocked makes the flusher commit early, unless the disk fails.
func (s *Store) requestFlushLocked() {
	if s.fault == "" {
		s.flushRequested = true
		s.wakeFlusher()
	}
}

// Close commits what is unsaved and closes the file. It waits at most ten seconds for the
// disk. The error says what could not be saved and is lost.
func (s *Store) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), diskTimeout)
	defer cancel()
	err := s.Flush(ctx)
	if errors.Is(err, ErrClosed) {
		return nil
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	if lockErr := s.lock(ctx); lockErr != nil {
		return errors.Join(err, lockErr)
	}
	defer s.unlock()
	s.fatalErr = ErrClosed // what waits for diskToken does not open the file again
	return errors.Join(err, s.closeDB())
}

// wakeFlusher makes the flusher check what is to do.
func (s *Store) wakeFlusher() {
	select {
	case s.wake <- struct{}{}:
	default: // it is awake already
	}
}

// lock takes diskToken. It waits until another caller has held it for ten seconds: a disk
// that hangs costs that wait once, not each caller.
func (s *Store) lock(ctx context.Context) error {
	select {
	case <-s.diskToken:
	default:
		select {
		case <-s.diskToken:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(diskTimeout - s.lockedFor()):
			return ErrBusy
		}
	}
	s.setLockedSince(time.Now())
	return nil
}

// unlock returns diskToken.
func (s *Store) unlock() {
	s.setLockedSince(time.Time{})
	s.diskToken <- struct{}{}
}

// setLockedSince sets since when diskToken is held, for other callers to know how long their
// wait may take.
func (s *Store) setLockedSince(since time.Time) {
	s.mu.Lock()
	s.lockedSince = since
	s.mu.Unlock()
}

// lockedFor is how long diskToken has been held.
func (s *Store) lockedFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lockedForLocked()
}

// lockedForLocked is lockedFor for a caller that holds mu.
func (s *Store) lockedForLocked() time.Duration {
	if s.lockedSince.IsZero() {
		return 0
	}
	return time.Since(s.lockedSince)
}
