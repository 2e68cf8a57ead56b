// Package history keeps samples on the SD card: batched, retained, queried in steps.
//
// A Store collects samples in memory and commits them to an SQLite file every few
// minutes, because each commit costs flash far more than the bytes it holds:
//
//	s, err := history.Open(history.Options{Path: "/var/lib/agentctl/history.db", Now: clock.NowMS})
//	go s.Record(ctx, p)                // samples of prober p until ctx ends, then a last commit
//	err = s.Query(ctx, history.Query{FromMS: f, StepMS: 60_000}, fn)
//	err = s.Close()
//
// A query joins the file and what is not committed yet without gap or repeat. One
// sample is kept for a millisecond, the first.
//
// The disk may be full, read-only, corrupt or gone: then the Store goes on from memory,
// says so in Stats, and records again by itself once it can. A corrupt file is set
// aside and a new one begun.
//
// Anybody may read the file while it is written:
//
//	sqlite3 history.db 'SELECT * FROM metrics ORDER BY ts DESC LIMIT 5'
package history

import (
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
	DefaultFlush    = 300 * time.Second
	MinFlush        = time.Second
	MaxFlush        = time.Hour
	DefaultMaxAge   = 30 * 24 * time.Hour
	MinMaxAge       = time.Minute
	DefaultMaxBytes = 64_000_000
	MinMaxBytes     = 2_000_000
)

const (
	// maxUnsaved bounds the samples in memory: an hour and 20 minutes of one a second.
	maxUnsaved = 4800
	// flushAtSamples is how many unsaved samples are committed before their time.
	flushAtSamples = 3700
	// maxUnsavedReadings bounds the readings of other modules in memory (24 bytes each).
	maxUnsavedReadings = 4 * maxUnsaved
	// flushAtReadings is to readings what flushAtSamples is to samples.
	flushAtReadings = maxUnsavedReadings * 3 / 4
	// diskTimeout bounds the wait for a disk that does not answer.
	diskTimeout = 10 * time.Second
)

// Errors a caller may decide by.
var (
	ErrClosed = errors.New("history: closed")
	ErrRange  = errors.New("history: the window ends before it begins")
	ErrBusy   = errors.New("history: the disk has not answered yet, ask again")
)

// Options configure a Store. Path is all it needs.
type Options struct {
	Path     string        // the database file; its directory is made when missing
	Flush    time.Duration // how often samples are committed, MinFlush..MaxFlush; default DefaultFlush
	MaxAge   time.Duration // older samples are not shown, and removed; default DefaultMaxAge
	MaxBytes int64         // the oldest samples make room beyond it; default DefaultMaxBytes
	Logger   *zap.Logger   // default none

	// Now is the trusted wall clock, milliseconds since 1970; not ok while the time is
	// unknown. Default the system's, believed from prober.MinTSMS on.
	Now func() (ms int64, ok bool)

	// Samples taken while the time is unknown are kept by the reading of Mono, a clock
	// that counts from the start of boot BootID, and get their time when it is known, if
	// that is in the same boot. The defaults are the kernel's, so that a restart of the
	// process loses nothing.
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
	wake   chan struct{} // room for one: the flusher has something new to look at

	diskToken chan struct{} // a token: who holds it may use the fields below and the file
	db        *db           // nil when not open
	fatalErr  error         // not nil: the file is not touched again by this process

	mu             sync.Mutex // protects the fields below; held for memory work only
	closed         bool
	flush          time.Duration
	maxAge         time.Duration
	maxBytes       int64
	purgePending   bool // retention was changed: apply it in full
	flushRequested bool // flush now
	isPaused       bool
	restartWatch   context.CancelFunc // not nil: ends the present Watch
	samples        buffer[values]     // unsaved, by timestamp
	readings       buffer[int64]      // unsaved, by readingID
	seq            uint64             // of the newest item in both
	latest         prober.Sample      // the newest there was, saved or not
	latestID       int64              // the id it was given, 0 when there is none
	hasUndated     bool               // there may be samples that wait for the time
	fault          string             // why the disk cannot be used, "" when it can
	lockedSince    time.Time          // since when somebody has the disk, zero for nobody
	stats          Stats
	statsDay       int64 // the day of stats.WrittenToday, in days since 1970
}

// Open makes a Store. It fails only for options that make no sense: the file is opened
// when it is first needed, and one that cannot be used shows in Stats.
func Open(o Options) (*Store, error) {
	if o.Path == "" {
		return nil, errors.New("history: no file named")
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
		log:       o.Logger,
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
		s.mono = kernelClock()
	}
	if s.now == nil {
		s.now = func() (int64, bool) {
			ms := time.Now().UnixMilli()
			return ms, ms >= prober.MinTSMS
		}
	}
	if s.log == nil {
		s.log = zap.NewNop()
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
		s.purgePending = false // what was so before the start as well is applied in small steps
	}
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
// file (at least MinMaxBytes); zero means the default. What is beyond is removed by the
// next flush, which comes at once; the file shrinks as well.
func (s *Store) SetRetention(age time.Duration, bytes int64) error {
	if age == 0 {
		age = DefaultMaxAge
	}
	if bytes == 0 {
		bytes = DefaultMaxBytes
	}
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

// SetRecording tells Record whether to take samples; it does at first.
func (s *Store) SetRecording(on bool) {
	s.mu.Lock()
	s.isPaused = !on
	if s.restartWatch != nil {
		s.restartWatch()
	}
	s.mu.Unlock()
}

// Add keeps a sample and the readings of other modules that belong to it, in memory at
// first. It never waits for the disk: beyond the bound the oldest unsaved goes and is
// counted, as a sample with impossible readings is, with all that belongs to it.
//
// A reading's value is kept to three decimals. One with another key than those at Reading,
// or whose value is no number, is dropped and counted.
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
		s.requestFlushLocked() // there is much to save, or the time is known now
	}
	s.hasUndated = s.hasUndated || id < 0
}

func (s *Store) addReadingLocked(id int64, r prober.Reading) {
	v, ok := milli(r.Value)
	k := idOf[r.Key]
	if !ok || k == 0 {
		s.stats.Dropped++
		return
	}
	s.countLocked(s.readings.add(readingID(id, k), v, s.seq))
}

func (s *Store) countLocked(dropped, repeated bool) {
	if dropped {
		s.stats.Dropped++
	}
	if repeated {
		s.stats.Repeated++
	}
}

// requestFlushLocked has the flusher commit before its time, if it can be hoped to.
func (s *Store) requestFlushLocked() {
	if s.fault == "" {
		s.flushRequested = true
		s.wakeFlusher()
	}
}

// Close commits what is left and closes the file. It waits at most ten seconds for the
// disk. What could not be saved is lost, and is in the error.
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
	s.fatalErr = ErrClosed
	return errors.Join(err, s.closeDB())
}

// wakeFlusher makes the flusher look again.
func (s *Store) wakeFlusher() {
	select {
	case s.wake <- struct{}{}:
	default: // already told
	}
}

// lock takes the file. It waits until somebody has had it for ten seconds: a disk that
// hangs costs that once, not each who asks.
func (s *Store) lock(ctx context.Context) error {
	select {
	case <-s.diskToken:
	default:
		timer := time.NewTimer(diskTimeout - s.lockedFor())
		defer timer.Stop()
		select {
		case <-s.diskToken:
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return ErrBusy
		}
	}
	s.setLockedSince(time.Now())
	return nil
}

func (s *Store) unlock() {
	s.setLockedSince(time.Time{})
	s.diskToken <- struct{}{}
}

func (s *Store) setLockedSince(since time.Time) {
	s.mu.Lock()
	s.lockedSince = since
	s.mu.Unlock()
}

func (s *Store) lockedFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lockedForLocked()
}

func (s *Store) lockedForLocked() time.Duration {
	if s.lockedSince.IsZero() {
		return 0
	}
	return time.Since(s.lockedSince)
}
