-- Every key, every state and every transition between states. One call makes one transition and writes its event,
-- so that record and stream cannot disagree.
--
--   action    from                        to                           asked for by
--   create    (none)                      waiting, queued              a client
--   claim     queued                      running                      a worker
--   beat      running cancelling pausing  the same                     a worker; the reply is go, cancel or pause
--   advance   running                     queued                       a worker, after the stage
--             cancelling                  cancelled, failed
--             pausing                     paused
--   release   running                     queued                       a worker that has saved everything
--             cancelling                  cancelled, failed
--             pausing                     paused
--   rest      running                     queued                       a worker that gathers too few hosts (gangs.lua)
--             cancelling                  cancelled, failed
--             pausing                     paused
--   die       running                     queued, failed               a worker; or its lease expired
--             cancelling                  cancelled, failed
--             pausing                     paused, failed
--   finish    running cancelling pausing  succeeded, failed            a worker
--   cancel    waiting queued paused       cancelled                    a client
--             running pausing             cancelling
--   pause     waiting queued              paused                       a client
--             running                     pausing
--   resume    paused                      waiting, queued              a client
--             pausing                     running
--   retry     failed cancelled            waiting, queued, cancelled   a client
--   delete    succeeded failed cancelled  (none)                       a client
--   retire    succeeded failed cancelled  (none)                       the operator's rules, after some time
--   due       waiting queued              failed                       its deadline, which a pause removes
--             running pausing             cancelling                   (it ends as failed)
--   adopt     (none)                      succeeded, failed            the operator, for a run without a record
--   settle    waiting                     waiting, queued, cancelled   the end of a job that it depends on
--             paused                      paused, cancelled
--
-- kd:format               string  the format of all this; a server of another format is refused by name
-- kd:job:{id}             hash    the record of a job; nested values are JSON under dotted names
-- kd:job:{id}:events      stream  events: type and data (JSON), about the last 10 000
-- kd:job:{id}:{series}    zset    metrics, evaluation, temperature, scalars: data by step, at most SERIES[series] points, spread evenly
-- kd:job:{id}:waits       set     dependencies that have not succeeded
-- kd:job:{id}:dependents  set     jobs whose waits contain this job
-- kd:job:{id}:study       list    of a search: the journal of its Optuna study, as lines of JSON
-- kd:job:{id}:trials      hash    of a search: number of a trial -> id of its job; the job's 'parent' is the search
-- kd:job:{id}:ranges      hash    of a capture by several workers: the table of ranges (ranges.lua), with the keys below it
-- kd:boards               zset    jobs with a table of ranges, by time of creation
-- kd:index:{owner}:{status}  zset jobs by time of creation (microseconds); * is any owner or status
-- kd:queue:{stage}        zset    queued jobs, by priority, then by time of creation
-- kd:queue:{stage}:{team} zset    the same, of one team
-- kd:queuers:{stage}      set     teams that have a queued job for the stage
-- kd:open                 zset    open jobs, by time of creation
-- kd:leases               zset    jobs that a worker has, by the end of the lease
-- kd:deadlines            zset    open jobs with a deadline, by deadline
-- kd:idempotency:{sha}    string  "job-id body-sha" of a POST with an Idempotency-Key, for a day
-- kd:caches:{owner}       set     fingerprints of caches that the owner's jobs made or read
-- kd:teams                set     teams that have ever had a job
-- kd:team:{team}          hash    the account of a team: device-milliseconds used recently and today, bytes on the disk, in all
--                                 and of caches, runs and files
-- kd:devices:{team}       hash    jobs that hold devices -> how many
-- kd:owners               hash    owner -> the team of its newest job
-- kd:policy               hash    the operator's rules: half_life_ms, history_seconds, and quotas as {quota} or {quota}:{team}
-- kd:records              hash    owner -> bytes of its jobs' records at their creation, including ended jobs
-- kd:cache:{fp}:jobs      set     jobs that made or read a cache
-- kd:webhooks             zset    "job event-id" of messages to send, by the time of the next try
-- kd:webhooks:tries       hash    the same -> failed tries
-- kd:counters             hash    counters, by the name of the Prometheus sample
-- kd:worker:{id}          string  a worker's heartbeat, with a TTL; the worker writes it
-- kd:workers              set     ids of workers; some may be gone
-- kd:keys:used            hash    short id of an API key -> the time of its last use; the API writes it
-- kd:celery:{stage}       list    Celery's hints that a job is queued; the record decides
--
-- Fencing: each claim gets the next fence. A call with an older fence returns "fenced" and changes nothing.
-- Attempts: a claim starts a new attempt only if the last one died ('fresh'). A clean stop continues the attempt.
-- Searches: an API's reconciler claims and drives them. When a search ends, its open trials are cancelled.
-- Fair share: a worker takes a job of the team that holds the fewest devices now; among equals, of the team that used the
-- fewest device-seconds recently, where a use counts half as much after each half-life; among these, of the team whose
-- first job is the oldest. Priority orders the jobs of one team. A team above a quota gets no devices.
-- Accounts: a beat, and the end of a claim, charge a job and its team for the devices that it held since the last charge,
-- until the end of its lease at most.
-- Times are milliseconds of this server's clock. Commands are those of Redis 6.2. No cluster: keys are computed.

local FORMAT = '2'
-- STAGES, UNMANNED, CAPTURE and CAPTURE_OF are written above this file, from kd/config/kinds.py.
local LONGEST_LEASE = 2 * 3600 * 1000  -- no lease is longer: KD_LEASE_SECONDS is at most half of it
local DAY = 24 * 60 * 60
local EVENTS = 10000
local HINTS = 32  -- kept in a queue of Celery: each wakes one idle worker
local TERMINAL = {succeeded = true, failed = true, cancelled = true}
local ACTIVE = {running = true, cancelling = true, pausing = true}
local OPEN = {'waiting', 'queued', 'running', 'cancelling', 'pausing', 'paused'}
-- The most points of each series. A point of scalars holds several numbers for each layer.
local SERIES = {metrics = 8192, evaluation = 8192, temperature = 8192, scalars = 1024}
-- The actions that a client may ask for, by status, in the order in which a client shows them.
local ALLOWED = {
  waiting = {'pause', 'cancel'},
  queued = {'pause', 'cancel'},
  running = {'pause', 'cancel'},
  cancelling = {},
  pausing = {'resume', 'cancel'},
  paused = {'resume', 'cancel'},
  succeeded = {'delete'},
  failed = {'retry', 'delete'},
  cancelled = {'retry', 'delete'},
}
-- The statuses in which an action has nothing left to do, which is no error.
local ALREADY = {
  cancel = {cancelling = true, cancelled = true},
  pause = {pausing = true, paused = true},
  resume = {waiting = true, queued = true, running = true},
}
-- Errors of a cache that a new capture repairs, if the job captured that cache itself.
local MENDED_BY_CAPTURE = {cache_missing = true, cache_incomplete = true, cache_corrupt = true}
-- The fields of a record that name caches.
local CACHE_FIELDS = {['cache.fingerprint'] = true, ['cache.fingerprints'] = true}
local REPLY = {running = 'go', cancelling = 'cancel', pausing = 'pause'}
local SECONDS = {1, 5, 15, 60, 300, 900, 3600, 14400, 86400, 604800, '+Inf'}

local QUOTAS = {'device_seconds', 'bytes'}

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local transitions = {}
local settling = {}  -- {job, its dependency that has ended}, ...: pairs for settle

-- ---------------------------------------------------------------- the record

local function key(id, part) return 'kd:job:' .. id .. (part and ':' .. part or '') end

local function get(id, field) return redis.call('HGET', key(id), field) end

local function set(id, ...)
  redis.call('HSET', key(id), ...)
  redis.call('HINCRBY', key(id), 'version', 1)
end

local function emit(id, type, data)
  return redis.call('XADD', key(id, 'events'), 'MAXLEN', '~', EVENTS, '*', 'type', type, 'data', data)
end

-- The name of a sample in GET /metrics; labels are name, value, name, value, ...
local function sample(name, labels)
  local pairs = {}
  for i = 1, #labels, 2 do pairs[#pairs + 1] = labels[i] .. '="' .. tostring(labels[i + 1]) .. '"' end
  return name .. '{' .. table.concat(pairs, ',') .. '}'
end

local function count(name, labels, amount)
  redis.call('HINCRBYFLOAT', 'kd:counters', sample(name, labels), amount or 1)
end

-- A time that the clock says is negative, because it was set back, counts as none: a sum only grows.
local function observe(name, labels, seconds)
  seconds = math.max(seconds, 0)
  count(name .. '_sum', labels, seconds)
  count(name .. '_count', labels)
  for _, bound in ipairs(SECONDS) do
    if bound == '+Inf' or seconds <= bound then
      local finer = {unpack(labels)}
      finer[#labels + 1], finer[#labels + 2] = 'le', bound
      count(name .. '_bucket', finer)
    end
  end
end

local function describe(id)
  local fields = redis.call('HMGET', key(id), 'status', 'stage', 'attempt', 'error', 'reason')
  local text = '{"status":"%s","stage":"%s","attempt":%s,"error":%s,"reason":%s}'
  return string.format(text, fields[1], fields[2], fields[3], fields[4], cjson.encode(fields[5] or cjson.null))
end

local function index(id, status, command)
  local created, owner = unpack(redis.call('HMGET', key(id), 'created_us', 'owner'))
  for _, who in ipairs({'*', owner or ''}) do
    local name = 'kd:index:' .. who .. ':' .. status
    if command == 'add' then redis.call('ZADD', name, created, id) else redis.call('ZREM', name, id) end
  end
end

local function arm(id)
  local seconds = tonumber(get(id, 'deadline_seconds'))
  if not seconds then return end
  redis.call('HSET', key(id), 'deadline_at', now + 1000 * seconds)
  redis.call('ZADD', 'kd:deadlines', now + 1000 * seconds, id)
end

local function disarm(id)
  redis.call('ZREM', 'kd:deadlines', id)
  redis.call('HDEL', key(id), 'deadline_at')
end

-- The history of an ended job expires after the time that the operator sets, unless the job is retried.
local HISTORY = {'events', 'metrics', 'evaluation', 'temperature', 'scalars', 'study', 'trials'}
local function keep(id, command)
  local seconds = tonumber(redis.call('HGET', 'kd:policy', 'history_seconds') or '') or 30 * DAY
  for _, part in ipairs(HISTORY) do
    if command == 'PERSIST' or seconds == 0 then redis.call('PERSIST', key(id, part))
    else redis.call('EXPIRE', key(id, part), string.format('%.0f', seconds)) end
  end
end

-- The table of ranges of a capture by several workers, and all below it. Its members are fenced from now on.
local RANGE_KEYS = {'ranges', 'ranges:free', 'ranges:begun', 'ranges:held', 'ranges:members', 'ranges:ends', 'ranges:done', 'ranges:refused'}
local function drop_ranges(id)
  if redis.call('ZREM', 'kd:boards', id) == 0 then return end
  for _, part in ipairs(RANGE_KEYS) do redis.call('DEL', key(id, part)) end
end

-- ---------------------------------------------------------------- teams

local function name_team(team, owner) return team or owner or 'local' end

local function team_of(id) return name_team(unpack(redis.call('HMGET', key(id), 'team', 'owner'))) end

-- The account of a team now: device-milliseconds used recently and today, bytes, and its quotas, or nil for none.
local function account(team)
  local used, at, day, today, bytes = unpack(
    redis.call('HMGET', 'kd:team:' .. team, 'recent', 'charged_at', 'day', 'today', 'bytes'))
  local rules = redis.call('HMGET', 'kd:policy', 'half_life_ms', 'device_seconds', 'bytes',
    'device_seconds:' .. team, 'bytes:' .. team)
  local half_life = tonumber(rules[1] or '') or 1000 * DAY
  local date = math.floor(now / 1000 / DAY)
  return {
    recent = (tonumber(used or '') or 0) * 0.5 ^ ((now - (tonumber(at or '') or now)) / half_life),
    date = date,
    today = tonumber(day or '') == date and tonumber(today) or 0,
    bytes = tonumber(bytes or '') or 0,
    limits = {device_seconds = tonumber(rules[4] or rules[2] or ''), bytes = tonumber(rules[5] or rules[3] or '')},
  }
end

-- The quota that a team has used up, or nothing.
local function exhausted(found)
  local used = {device_seconds = found.today / 1000, bytes = found.bytes}
  for _, quota in ipairs(QUOTAS) do
    if found.limits[quota] and used[quota] >= found.limits[quota] then return quota end
  end
end

local function explain(team, found, quota)
  if quota == 'bytes' then
    return string.format('Caches and runs of team %s take %.0f bytes, and its quota is %.0f: its jobs wait until some are '
      .. 'deleted.', team, found.bytes, found.limits.bytes)
  end
  return string.format('Team %s has used %.0f of its %.0f device-seconds of this day: its jobs wait until 00:00 UTC.',
    team, found.today / 1000, found.limits.device_seconds)
end

-- Tell a queued job, or all queued jobs of a team, that they wait for a quota.
local function warn(id, text) emit(id, 'warning', cjson.encode({message = text})) end

local function warn_all(team, found, quota)
  local text = explain(team, found, quota)
  for _, stage in ipairs(STAGES) do
    for _, id in ipairs(redis.call('ZRANGE', 'kd:queue:' .. stage .. ':' .. team, 0, -1)) do warn(id, text) end
  end
end

-- Change the account of a team. If that uses a quota up, its queued jobs hear of it.
local function book(team, found, ...)
  local before = exhausted(found)
  for i = 1, select('#', ...), 2 do found[select(i, ...)] = select(i + 1, ...) end
  redis.call('HSET', 'kd:team:' .. team, 'recent', string.format('%.3f', found.recent), 'charged_at', now,
    'day', found.date, 'today', string.format('%.0f', found.today), 'bytes', string.format('%.0f', found.bytes))
  local quota = exhausted(found)
  if quota and not before then warn_all(team, found, quota) end
end

-- Charge a job and its team for the devices that it held since the last charge, but for no time after the end of its lease:
-- where a beat comes later, the machine of the job store or of the worker may have slept.
local function charge(id)
  local team, owner, devices, since, spent, price, cost = unpack(redis.call(
    'HMGET', key(id), 'team', 'owner', 'devices', 'charged_at', 'device_ms', 'price', 'cost'))
  if not devices then return end
  local held = math.min(now, tonumber(redis.call('ZSCORE', 'kd:leases', id) or now))
  local more = math.max(held - since, 0) * devices
  redis.call('HSET', key(id), 'charged_at', now, 'device_ms', string.format('%.0f', (spent or 0) + more))
  if price then
    redis.call('HSET', key(id), 'cost', string.format('%.9f', (cost or 0) + more / 3600000 * price))
  end
  if more == 0 then return end
  team = name_team(team, owner)
  local found = account(team)
  book(team, found, 'recent', found.recent + more, 'today', found.today + more)
end

-- The devices that each worker takes for a job: those that it asks for, or one.
local function count_needed(gpus) return math.max(tonumber(gpus or '') or 1, 1) end

-- The driver of a search needs no devices.
local function take_devices(id, price)
  local gpus, stage = unpack(redis.call('HMGET', key(id), 'gpus', 'stage'))
  if UNMANNED[stage] then return end
  local devices = count_needed(gpus)
  redis.call('HSET', key(id), 'devices', devices, 'charged_at', now)
  if price ~= '' then redis.call('HSET', key(id), 'price', price) else redis.call('HDEL', key(id), 'price') end
  redis.call('HSET', 'kd:devices:' .. team_of(id), id, devices)
end

local function give_devices_back(id)
  charge(id)
  if redis.call('HDEL', key(id), 'devices') == 1 then redis.call('HDEL', 'kd:devices:' .. team_of(id), id) end
end

local function count_devices(team)
  local total = 0
  for _, devices in ipairs(redis.call('HVALS', 'kd:devices:' .. team)) do total = total + devices end
  return total
end

local function goes_before(a, b)
  if a.held ~= b.held then return a.held < b.held end
  if a.recent ~= b.recent then return a.recent < b.recent end
  return a.created < b.created
end

-- The teams that have queued jobs for a stage, in the order in which a worker serves them. Those above a quota are left
-- out, except in the queue of searches, whose drivers use no devices.
local lines = {}
local function line_up(stage)
  if lines[stage] then return lines[stage] end
  local found = {}
  for _, team in ipairs(redis.call('SMEMBERS', 'kd:queuers:' .. stage)) do
    local name = 'kd:queue:' .. stage .. ':' .. team
    local first, state = redis.call('ZRANGE', name, 0, 0)[1], account(team)
    if first and (UNMANNED[stage] or not exhausted(state)) then
      found[#found + 1] = {team = team, held = count_devices(team), recent = state.recent,
        created = tonumber(get(first, 'created_us') or '') or 0,
        jobs = redis.call('ZCARD', name)}
    end
  end
  table.sort(found, goes_before)
  lines[stage] = found
  return found
end

-- Why the jobs of a team wait for a quota, or false.
local reasons = {}
local function why(team)
  if reasons[team] == nil then
    local found = account(team)
    local quota = exhausted(found)
    reasons[team] = quota and explain(team, found, quota) or false
  end
  return reasons[team]
end

-- The jobs that would start before a queued one if all took equally long, so that the teams took turns.
local function place(id, stage, team)
  local rank = redis.call('ZRANK', 'kd:queue:' .. stage .. ':' .. team, id)
  if not rank then return rank end
  local before, own = rank, false
  for _, each in ipairs(line_up(stage)) do
    if each.team == team then own = true
    else before = before + math.min(each.jobs, own and rank or rank + 1) end
  end
  return before
end

-- ---------------------------------------------------------------- how a status changes

local ended

-- Put a job into its queue. Returns why it must wait there, if a quota of its team is used up.
-- One step of priority outweighs thirty years of age. The score stays a whole number below 2^53, so it is exact.
local function queue(id)
  local created, priority, stage = unpack(redis.call('HMGET', key(id), 'created_us', 'priority', 'stage'))
  local name, team = 'kd:queue:' .. stage, team_of(id)
  redis.call('ZADD', name, created - priority * 1e15, id)
  redis.call('ZADD', name .. ':' .. team, created - priority * 1e15, id)
  redis.call('SADD', 'kd:queuers:' .. stage, team)
  local found = account(team)
  local quota = not UNMANNED[stage] and exhausted(found)
  return quota and explain(team, found, quota)
end

local function unqueue(id, stage)
  local name, team = 'kd:queue:' .. stage, team_of(id)
  redis.call('ZREM', name, id)
  redis.call('ZREM', name .. ':' .. team, id)
  if redis.call('ZCARD', name .. ':' .. team) == 0 then redis.call('SREM', 'kd:queuers:' .. stage, team) end
end

local function move(id, status, ...)
  local before, stage = unpack(redis.call('HMGET', key(id), 'status', 'stage'))
  if before then index(id, before, 'remove') end
  if before == 'queued' then unqueue(id, stage) end
  if ACTIVE[before] and not ACTIVE[status] then give_devices_back(id) end
  redis.call('HDEL', key(id), 'reason')
  set(id, 'status', status, ...)
  index(id, status, 'add')
  local waits
  if status == 'queued' then
    redis.call('HSET', key(id), 'queued_at', now, 'dispatched_at', now)
    waits = queue(id)
  end
  if not ACTIVE[status] then
    drop_ranges(id)
    redis.call('ZREM', 'kd:leases', id)
    redis.call('HDEL', key(id), 'worker')
  end
  if status == 'paused' or status == 'cancelling' then disarm(id) end
  if TERMINAL[status] then
    set(id, 'finished_at', now)
    redis.call('ZREM', 'kd:open', id)
    disarm(id)
  end
  count('kd_jobs_total', {'kind', get(id, 'kind'), 'status', status})
  local event = emit(id, 'status', describe(id))
  if waits then warn(id, waits) end
  if (get(id, 'webhook') or '') ~= '' then redis.call('ZADD', 'kd:webhooks', now, id .. ' ' .. event) end
  if TERMINAL[status] then ended(id, status) end
  return status
end

local function each_trial(id, action)
  for _, trial in ipairs(redis.call('HVALS', key(id, 'trials'))) do transitions.change(action, trial) end
end

-- A trial that is cancelled because its search ended says so: a retry of the search goes on with it.
local function stop_trials(id)
  for _, trial in ipairs(redis.call('HVALS', key(id, 'trials'))) do
    if transitions.change('cancel', trial)[1] == 'done' then redis.call('HSET', key(trial), 'stopped_with', id) end
  end
end

-- The consequences of an end: open trials are cancelled, and dependents go on or are cancelled.
function ended(id, status)
  local kind, started, spent, gpus = unpack(redis.call('HMGET', key(id), 'kind', 'started_at', 'device_ms', 'gpus'))
  if started then observe('kd_job_duration_seconds', {'kind', kind, 'status', status}, (now - started) / 1000) end
  if status == 'succeeded' then
    observe('kd_job_device_seconds', {'kind', kind}, (spent or 0) / 1000)
    observe('kd_job_worker_seconds', {'kind', kind}, (spent or 0) / 1000 / count_needed(gpus))
  end
  stop_trials(id)
  for _, other in ipairs(redis.call('SMEMBERS', key(id, 'dependents'))) do settling[#settling + 1] = {other, id} end
  if status == 'succeeded' then redis.call('DEL', key(id, 'dependents')) end
  keep(id, 'EXPIRE')
end

-- Queue a job, or let it wait for its dependencies.
local function enter(id, ...)
  if redis.call('SCARD', key(id, 'waits')) > 0 then return move(id, 'waiting', 'reason', 'dependencies', ...) end
  return move(id, 'queued', ...)
end

-- A worker has stopped and saved everything.
local function stopped(id, ...)
  local status, verdict = unpack(redis.call('HMGET', key(id), 'status', 'verdict'))
  if status == 'cancelling' and verdict then
    return move(id, 'failed', 'error', verdict, 'reason', cjson.decode(verdict).type)
  end
  if status == 'cancelling' then return move(id, 'cancelled') end
  if status == 'pausing' then return move(id, 'paused', ...) end
  return move(id, 'queued', ...)
end

local function died(id, failure)
  local attempt, before, limit, status = unpack(
    redis.call('HMGET', key(id), 'attempt', 'attempts_before', 'max_attempts', 'status'))
  count('kd_job_attempts_total', {'reason', cjson.decode(failure).type})
  -- Where a number is damaged, this was the last attempt.
  local used = (tonumber(attempt or '') or math.huge) - (tonumber(before or '') or 0)
  if status ~= 'cancelling' and used >= (tonumber(limit or '') or 0) then
    return move(id, 'failed', 'error', failure)
  end
  local lost = cjson.decode(failure)
  emit(id, 'warning', cjson.encode({message = lost.detail, error = lost.type}))
  return stopped(id, 'fresh', '1')
end

local function holds(id, fence)
  local status, current = unpack(redis.call('HMGET', key(id), 'status', 'fence'))
  if ACTIVE[status] and current == fence then return true end
  count('kd_fenced_writes_total', {})
  return false
end

-- ---------------------------------------------------------------- from a client

-- The value of a field that holds JSON, or nil if it has none or its text is damaged.
local function decode(id, field)
  local sound, value = pcall(cjson.decode, get(id, field) or '')
  return sound and value or nil
end

-- The caches of a job: the one that it captures or reads now, and all that it joins.
local function caches_of(id)
  local found, several = {decode(id, 'cache.fingerprint')}, decode(id, 'cache.fingerprints')
  for _, name in ipairs(type(several) == 'table' and several or {}) do found[#found + 1] = name end
  return found
end

local function let_go(id)
  for _, name in ipairs(caches_of(id)) do redis.call('SREM', 'kd:cache:' .. tostring(name) .. ':jobs', id) end
end

-- Set a field of the record that names caches, if it is not null.
local function uses(id, field, text)
  if text == 'null' then return end
  let_go(id)
  redis.call('HSET', key(id), field, text)
  for _, name in ipairs(caches_of(id)) do
    redis.call('SADD', 'kd:caches:' .. get(id, 'owner'), name)
    redis.call('SADD', 'kd:cache:' .. name .. ':jobs', id)
  end
end

-- The first dependency that can never succeed, and the reason; or nothing.
local function hopeless(owner, sees_all, ids)
  for _, other in ipairs(ids) do
    local status, whose = unpack(redis.call('HMGET', key(other), 'status', 'owner'))
    if not status or (whose ~= owner and sees_all ~= '1') then return {'bad_dependency', other, 'unknown'} end
    if status == 'failed' or status == 'cancelled' then return {'bad_dependency', other, status} end
  end
end

local function await(id, ids)
  for _, other in ipairs(ids) do
    local status = get(other, 'status')
    if status and status ~= 'succeeded' then
      redis.call('SADD', key(id, 'waits'), other)
      redis.call('SADD', key(other, 'dependents'), id)
    end
  end
end

local function open_jobs(owner)
  local total = 0
  for _, status in ipairs(OPEN) do total = total + redis.call('ZCARD', 'kd:index:' .. owner .. ':' .. status) end
  return total
end

local function begin(id, owner, ...)
  local created = clock[1] * 1000000 + clock[2]
  while redis.call('ZCOUNT', 'kd:index:*:*', created, created) > 0 do created = created + 1 end
  set(id, 'format', FORMAT, 'id', id, 'owner', owner, 'created_at', now, 'created_us', string.format('%.0f', created),
    'attempt', 0, 'attempts_before', 0, 'fence', 0, 'fresh', '1', 'error', 'null', ...)
  local team = team_of(id)
  redis.call('SADD', 'kd:teams', team)
  redis.call('HSET', 'kd:owners', owner, team)
  redis.call('ZADD', 'kd:open', created, id)
  index(id, '*', 'add')
  for field in pairs(CACHE_FIELDS) do uses(id, field, get(id, field) or 'null') end
  arm(id)
end

-- The bytes of {field, value, ...}.
local function measure(fields)
  local bytes = 0
  for _, text in ipairs(fields) do bytes = bytes + #text end
  return bytes
end

-- Records never expire, so each owner has a quota of bytes. A record without a count weighs nothing.
local function weigh(owner, bytes)
  local total = redis.call('HINCRBY', 'kd:records', owner, bytes)
  if total <= 0 or redis.call('ZCARD', 'kd:index:' .. owner .. ':*') == 0 then
    redis.call('HDEL', 'kd:records', owner)
  end
end

-- create(id, owner, sees_all, key_sha or '', body_sha, max_open or '', max_bytes or '', field, value, ...)
--   -> {created | replayed | conflict, id} | {quota, open jobs} | {record_quota, bytes} | {team_quota, bytes}
--    | {bad_dependency, id, its status or unknown}
function transitions.create(id, owner, sees_all, sha, body, max_open, max_bytes, ...)
  local earlier = sha ~= '' and redis.call('GET', 'kd:idempotency:' .. sha)
  if earlier then
    local other, other_body = string.match(earlier, '^(%S+) (%S+)$')
    if redis.call('EXISTS', key(other)) == 1 then
      return {other_body == body and 'replayed' or 'conflict', other}
    end
  end
  local fields = {...}
  local needed = {}
  local bytes = measure(fields)
  local team = owner
  for i = 1, #fields, 2 do
    if fields[i] == 'depends_on' then needed = cjson.decode(fields[i + 1]) end
    if fields[i] == 'team' then team = fields[i + 1] end
  end
  local refused = hopeless(owner, sees_all, needed)
  if refused then return refused end
  if max_open ~= '' and open_jobs(owner) >= tonumber(max_open) then return {'quota', tostring(open_jobs(owner))} end
  local total = bytes + (tonumber(redis.call('HGET', 'kd:records', owner) or '') or 0)
  if max_bytes ~= '' and total > tonumber(max_bytes) then return {'record_quota', string.format('%.0f', total)} end
  local found = max_bytes ~= '' and account(team)
  if found and found.limits.bytes and found.bytes >= found.limits.bytes then
    return {'team_quota', string.format('%.0f', found.bytes)}
  end
  if sha ~= '' then redis.call('SET', 'kd:idempotency:' .. sha, id .. ' ' .. body, 'EX', DAY) end
  begin(id, owner, 'record_bytes', bytes, ...)
  weigh(owner, bytes)
  await(id, needed)
  enter(id)
  return {'created', id}
end

-- Each change is called only from a status that ALLOWED lists it for. It returns the status after it.
local changes = {}

function changes.cancel(id, status)
  return move(id, ACTIVE[status] and 'cancelling' or 'cancelled')
end

function changes.pause(id, status)
  each_trial(id, 'pause')
  return move(id, status == 'running' and 'pausing' or 'paused')
end

function changes.resume(id, status)
  each_trial(id, 'resume')
  arm(id)
  if status == 'pausing' then return move(id, 'running') end
  return enter(id)
end

-- The dependency 'other' of a job has ended: the job goes on, or is cancelled.
local function settle(id, other)
  local status, outcome = get(id, 'status'), get(other, 'status')
  if not status then return end
  if outcome == 'succeeded' and redis.call('SREM', key(id, 'waits'), other) == 1 then
    redis.call('HINCRBY', key(id), 'version', 1)
  end
  if status ~= 'waiting' and status ~= 'paused' then return end
  if outcome ~= 'succeeded' then
    local what = ({failed = 'failed', cancelled = 'was cancelled'})[outcome] or 'was deleted'
    local detail = string.format('%s, which this job depends on, %s.', other, what)
    local remedy = outcome and 'Retry that job, then this one.' or 'Create it anew with jobs that exist.'
    local failure = cjson.encode({type = 'dependency_failed', detail = detail, remedy = remedy})
    return move(id, 'cancelled', 'reason', 'dependency_failed', 'error', failure)
  end
  if status == 'waiting' and redis.call('SCARD', key(id, 'waits')) == 0 then return enter(id) end
end

-- A retry goes on at the stage that failed. If that stage missed its cache, it would miss it again.
local function rewind(id)
  local failure = decode(id, 'error')
  local kind, stage, turn = unpack(redis.call('HMGET', key(id), 'kind', 'stage', 'turn'))
  local capture = CAPTURE_OF[string.format('%s %s %s', kind, stage, turn or 0)]
  if type(failure) == 'table' and MENDED_BY_CAPTURE[failure.type] and capture then
    redis.call('HSET', key(id), 'stage', CAPTURE, 'turn', capture)
  end
end

function changes.retry(id)
  rewind(id)
  redis.call('HDEL', key(id), 'started_at', 'finished_at', 'verdict', 'stopped_with')
  redis.call('HSET', key(id), 'attempts_before', get(id, 'attempt'), 'fresh', '1', 'error', 'null')
  redis.call('ZADD', 'kd:open', get(id, 'created_us'), id)
  keep(id, 'PERSIST')
  arm(id)
  local needed = cjson.decode(get(id, 'depends_on'))
  await(id, needed)
  enter(id)
  for _, other in ipairs(needed) do
    local open = redis.call('ZSCORE', 'kd:open', other)
    if not open and redis.call('SISMEMBER', key(id, 'waits'), other) == 1 then settle(id, other) end
  end
  return get(id, 'status')
end

-- Take a job off every list. A job that has ended is in none but the indexes; one whose status is damaged may be in any,
-- and without its record it would be in the way of the others.
local function unlist(id)
  for status in pairs(ALLOWED) do index(id, status, 'remove') end
  index(id, '*', 'remove')
  for _, stage in ipairs(STAGES) do unqueue(id, stage) end
  for _, name in ipairs({'kd:open', 'kd:leases', 'kd:deadlines'}) do redis.call('ZREM', name, id) end
  redis.call('HDEL', 'kd:devices:' .. team_of(id), id)
  drop_ranges(id)
end

function changes.delete(id)
  let_go(id)
  for _, other in ipairs(decode(id, 'depends_on') or {}) do redis.call('SREM', key(other, 'dependents'), id) end
  unlist(id)
  weigh(get(id, 'owner') or '', -(tonumber(get(id, 'record_bytes') or '') or 0))
  for _, part in ipairs(HISTORY) do redis.call('DEL', key(id, part)) end
  redis.call('DEL', key(id), key(id, 'waits'), key(id, 'dependents'))
  return 'deleted'
end

-- The actions that a job allows. An open search needs its trials: none of them can be deleted before it ends.
local function allowed(status, parent)
  local open = parent and parent ~= '' and redis.call('ZSCORE', 'kd:open', parent)
  local found = {}
  -- A record whose status is damaged can only be removed.
  for _, action in ipairs(ALLOWED[status] or {'delete'}) do
    if not (open and action == 'delete') then found[#found + 1] = action end
  end
  return found
end

local function allows(actions, action)
  for _, each in ipairs(actions) do
    if each == action then return true end
  end
  return false
end

-- The heartbeats of all workers; a worker whose heartbeat has expired has none.
local function workers()
  local found = {}
  for _, worker in ipairs(redis.call('SMEMBERS', 'kd:workers')) do
    found[#found + 1] = redis.call('GET', 'kd:worker:' .. worker) or nil
  end
  return found
end

-- The sum of the seconds for which workers had the jobs that have succeeded, and their number, as text. Then for each kind
-- of job its name, the sum of the device-seconds of those jobs, and their number.
local function durations()
  local counters = redis.call('HGETALL', 'kd:counters')
  local totals = {sum = 0, count = 0}
  local kinds = {}
  for i = 1, #counters, 2 do
    local part = string.match(counters[i], '^kd_job_worker_seconds_(%l+){')
    if totals[part] then totals[part] = totals[part] + counters[i + 1] end
    local use, kind = string.match(counters[i], '^kd_job_device_seconds_(%l+){kind="(%l+)"}$')
    if use then
      kinds[kind] = kinds[kind] or {}
      kinds[kind][use] = counters[i + 1]
    end
  end
  local found = {tostring(totals.sum), tostring(totals.count)}
  for kind, use in pairs(kinds) do
    for _, value in ipairs({kind, use.sum or '0', use.count or '0'}) do found[#found + 1] = value end
  end
  return found
end

-- show(id, ...) -> {jobs, workers, durations}; a job is {field, value, ...; jobs it waits for; place in the queue or
-- nothing; actions that it allows; why a quota makes it wait, or nothing}. Workers and durations are empty if every job
-- has ended. Changes nothing.
function transitions.show(...)
  local jobs = {}
  local open = false
  for i, id in ipairs({...}) do
    local pairs = redis.call('HGETALL', key(id))
    local record = {}
    for j = 1, #pairs, 2 do record[pairs[j]] = pairs[j + 1] end
    local team, stage = name_team(record.team, record.owner), record.stage or ''
    local before = record.status == 'queued' and place(id, stage, team)
    local waits = before and not UNMANNED[stage] and why(team)
    open = open or not (TERMINAL[record.status] or #pairs == 0)
    jobs[i] = {pairs, redis.call('SMEMBERS', key(id, 'waits')), before, allowed(record.status, record.parent), waits}
  end
  if not open then return {jobs, {}, {}} end
  return {jobs, workers(), durations()}
end

-- change(cancel | pause | resume | retry | delete, id, max_open or '')
--   -> {done | already, the status now} | {illegal, the status now, an action that it allows, ...} | {unknown, ''}
--    | {quota, the status now, open jobs}: a retry would open one more job than its owner may have
function transitions.change(action, id, max_open)
  local status, parent, owner = unpack(redis.call('HMGET', key(id), 'status', 'parent', 'owner'))
  if not status then return {'unknown', ''} end
  local actions = allowed(status, parent)
  if allows(actions, action) then
    local limit = action == 'retry' and tonumber(max_open or '')
    if limit and open_jobs(owner or '') >= limit then return {'quota', status, tostring(open_jobs(owner or ''))} end
    return {'done', changes[action](id, status)}
  end
  if ALREADY[action] and ALREADY[action][status] then return {'already', status} end
  return {'illegal', status, unpack(actions)}
end

-- named(name) -> ids of open jobs whose record contains the name: the id of a job or a file, or a fingerprint
function transitions.named(name)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', 'kd:open', 0, -1)) do
    for _, text in ipairs(redis.call('HMGET', key(id), 'id', 'config', 'cache.fingerprint', 'cache.fingerprints',
        'parent')) do
      if text and string.find(text, name, 1, true) then
        found[#found + 1] = id
        break
      end
    end
  end
  return found
end

-- Whether a job ended so long ago, and no open search needs it as a trial.
local function has_ended(id, age)
  local status, finished, parent = unpack(redis.call('HMGET', key(id), 'status', 'finished_at', 'parent'))
  local old = TERMINAL[status] and now - (tonumber(finished or '') or now) >= tonumber(age)
  return old and allows(allowed(status, parent), 'delete')
end

-- retire(id, age_ms, 1 if open jobs may name it) -> retired | kept: delete a job that ended so long ago
function transitions.retire(id, age, forced)
  if not has_ended(id, age) or (forced ~= '1' and #transitions.named(id) > 0) then return 'kept' end
  changes.delete(id, get(id, 'status'))
  return 'retired'
end

-- adopt(id, owner, succeeded | failed, error, field, value, ...) -> adopted | exists
-- The record of a run whose record was lost: an operator restores it from the run's folder.
function transitions.adopt(id, owner, status, failure, ...)
  if redis.call('EXISTS', key(id)) == 1 then return 'exists' end
  local bytes = measure({...})
  begin(id, owner, 'record_bytes', bytes, ...)
  weigh(owner, bytes)
  move(id, status, 'error', failure)
  return 'adopted'
end

-- ---------------------------------------------------------------- from a worker

local function fits(id, gpus, memory)
  local needed = redis.call('HMGET', key(id), 'gpus', 'memory')
  local devices, bytes = tonumber(needed[1] or ''), tonumber(needed[2] or '')
  return (not devices or devices <= tonumber(gpus)) and (not bytes or bytes <= tonumber(memory))
end

-- claim(id, stage, worker, lease_ms, gpus, memory, price of a device-hour or '')
--   -> {id, fence, attempt, config, owner, request_id, stage, turn},
-- or nothing if the job is not queued for this stage or needs more than the worker has
function transitions.claim(id, stage, worker, lease, gpus, memory, price)
  local status, waits_for, queued = unpack(redis.call('HMGET', key(id), 'status', 'stage', 'queued_at'))
  if status ~= 'queued' or waits_for ~= stage or not fits(id, gpus, memory) then return false end
  local fence = redis.call('HINCRBY', key(id), 'fence', 1)
  local attempt = redis.call('HINCRBY', key(id), 'attempt', get(id, 'fresh'))
  redis.call('HSETNX', key(id), 'started_at', now)
  redis.call('ZADD', 'kd:leases', now + lease, id)
  observe('kd_job_queue_wait_seconds', {'stage', stage}, (now - queued) / 1000)
  move(id, 'running', 'worker', worker, 'fresh', '0', 'batch', '0', 'heartbeat_at', now)
  take_devices(id, price)
  local rest = redis.call('HMGET', key(id), 'config', 'owner', 'request_id', 'turn')
  return {id, fence, attempt, rest[1], rest[2], rest[3] or '', stage, rest[4] or '0'}
end

-- Errors that a damaged record causes, in the words of the server and of Lua. Any other error is no matter of one record: a
-- server that is full, or must not write, refuses a command in every record.
local DAMAGE = {'WRONGTYPE', 'not an integer', 'not a valid float', 'attempt to ', 'bad argument', 'Expected ',
  'must be strings or integers'}

-- Call a function for one record. Returns whether it is sound, and the result or the text of the error.
local function guard(act, ...)
  local sound, found = pcall(act, ...)
  if sound then return true, found end
  local text = type(found) == 'table' and found.err or tostring(found)
  for _, words in ipairs(DAMAGE) do
    if string.find(text, words, 1, true) then return false, text end
  end
  error(string.match(text, '^%u+ ') and {err = text} or found, 0)  -- as a table it keeps its code, such as OOM
end

local function waits_in(id, stage)
  local status, waits_for = unpack(redis.call('HMGET', key(id), 'status', 'stage'))
  return status == 'queued' and waits_for == stage
end

-- Whether a worker may begin a job of several hosts: as many workers live, and it has not just looked for them in vain.
local function can_gather(id, stage)
  local hosts, rests, gpus, memory = unpack(redis.call('HMGET', key(id), 'hosts', 'rests_until', 'gpus', 'memory'))
  if not hosts or stage == CAPTURE then return true end
  if now < (tonumber(rests or '') or 0) then return false end
  local found = 0
  for _, text in ipairs(workers()) do
    local worker = cjson.decode(text)
    local own = worker.device
    local enough = (tonumber(gpus or '') or 0) <= own.count
      and (tonumber(memory or '') or 0) <= (tonumber(own.memory_bytes) or math.huge)
    if enough and allows(worker.stages, stage) then found = found + 1 end
  end
  return found >= tonumber(hosts)
end

-- The first queued job of a team that fits.
local function first_fit(stage, team, gpus, memory)
  local start = 0
  while true do
    local ids = redis.call('ZRANGE', 'kd:queue:' .. stage .. ':' .. team, start, start + 99)
    if #ids == 0 then return end
    for _, id in ipairs(ids) do
      if waits_in(id, stage) and fits(id, gpus, memory) and can_gather(id, stage) then return id end
    end
    start = start + #ids
  end
end

-- A queued job whose record is damaged ends, so that it does not keep workers from the jobs behind it.
local function fail_damaged(id, stage, text)
  local failure = {type = 'unreadable_record', detail = 'The record of this job is damaged: ' .. text,
    remedy = 'Delete the job, and submit it again.'}
  guard(move, id, 'failed', 'error', cjson.encode(failure))
  unqueue(id, stage)
  redis.call('ZREM', 'kd:leases', id)
end

-- claim_next(stages, worker, lease_ms, gpus, memory, price) -> as claim, for the first job that fits, of the first team in
-- the line that has one. Of a team's queues, and of teams that are equal, the stage that is named first goes first
-- ('created' is the place in the line, which goes_before compares last).
function transitions.claim_next(stages, worker, lease, gpus, memory, price)
  local line = {}
  for stage in string.gmatch(stages, '%S+') do
    for _, each in ipairs(line_up(stage)) do
      line[#line + 1] = {team = each.team, held = each.held, recent = each.recent, created = #line, stage = stage}
    end
  end
  table.sort(line, goes_before)
  for _, each in ipairs(line) do
    local id = first_fit(each.stage, each.team, gpus, memory)
    while id do
      local sound, claim = guard(transitions.claim, id, each.stage, worker, lease, gpus, memory, price)
      if sound then return claim end
      fail_damaged(id, each.stage, claim)
      id = first_fit(each.stage, each.team, gpus, memory)
    end
  end
  return false
end

-- A step that runs again (after a stop between two checkpoints) replaces its earlier point.
local function plot(id, series, data)
  local step = cjson.decode(data).step
  if type(step) ~= 'number' then return end
  local name = key(id, series)
  redis.call('ZREMRANGEBYSCORE', name, step, step)
  redis.call('ZADD', name, step, data)
  if redis.call('ZCARD', name) <= SERIES[series] then return end
  local points = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
  local kept = tonumber(points[2])
  local gap = (points[#points] - kept) / (SERIES[series] / 2)  -- in steps: dropping every second point would thin out the old part again and again
  for i = 3, #points - 2, 2 do
    if points[i + 1] - kept < gap then redis.call('ZREM', name, points[i]) else kept = tonumber(points[i + 1]) end
  end
end

-- beat(id, fence, lease_ms, batch, field_count, field, value, ..., type, data, ...) -> go | cancel | pause | fenced
-- A batch whose reply was lost comes twice. It is written once.
function transitions.beat(id, fence, lease, batch, fields, ...)
  if not holds(id, fence) then return 'fenced' end
  local pairs = {...}
  charge(id)  -- before the lease gets another end
  redis.call('ZADD', 'kd:leases', now + lease, id)
  set(id, 'heartbeat_at', now)
  local written, status = unpack(redis.call('HMGET', key(id), 'batch', 'status'))
  if tonumber(batch) > tonumber(written) then
    redis.call('HSET', key(id), 'batch', batch)
    for i = 1, 2 * fields, 2 do
      if CACHE_FIELDS[pairs[i]] then uses(id, pairs[i], pairs[i + 1])
      else redis.call('HSET', key(id), pairs[i], pairs[i + 1]) end
    end
    for i = 2 * fields + 1, #pairs, 2 do
      emit(id, pairs[i], pairs[i + 1])
      if SERIES[pairs[i]] then plot(id, pairs[i], pairs[i + 1]) end
    end
  end
  return REPLY[status]
end

-- advance(id, fence, stage, turn) -> queued | cancelled | paused | failed | fenced
function transitions.advance(id, fence, stage, turn)
  if not holds(id, fence) then return 'fenced' end
  for _, field in ipairs(redis.call('HKEYS', key(id))) do
    if string.sub(field, 1, 9) == 'progress.' then redis.call('HDEL', key(id), field) end
  end
  return stopped(id, 'stage', stage, 'turn', turn)
end

-- finish(id, fence, succeeded | failed, error) -> that status | fenced
function transitions.finish(id, fence, status, failure)
  if not holds(id, fence) then return 'fenced' end
  return move(id, status, 'error', failure)
end

-- release(id, fence) -> queued | cancelled | paused | failed | fenced: a clean stop
function transitions.release(id, fence)
  if not holds(id, fence) then return 'fenced' end
  return stopped(id)
end

-- fail_attempt(id, fence, error) -> queued | failed | cancelled | paused | fenced: the attempt died
function transitions.fail_attempt(id, fence, failure)
  if not holds(id, fence) then return 'fenced' end
  return died(id, failure)
end

-- idle(id, fence) -> go | fenced: the job keeps its claim, but gives its devices back while it waits for another process
function transitions.idle(id, fence)
  if not holds(id, fence) then return 'fenced' end
  give_devices_back(id)
  return 'go'
end

-- ---------------------------------------------------------------- from the reconciler

-- The reconciler's steps take many jobs in one call. One whose record is damaged must not stop the others: its error is
-- caught, and the step's list lets it go.
local function take_back(id, failure)
  -- Nobody knows how long a lost worker went on after its last beat, so this time is not charged.
  redis.call('HSET', key(id), 'charged_at', now)
  -- The driver of a search keeps no state, so its death costs no attempt.
  if UNMANNED[get(id, 'stage')] then stopped(id) else died(id, failure) end
  redis.call('HSET', key(id), 'dispatched_at', 0)  -- the next call of hints announces it
end

-- expire(error) -> ids of jobs whose lease had expired
function transitions.expire(failure)
  local ids = redis.call('ZRANGEBYSCORE', 'kd:leases', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    count('kd_lease_expirations_total', {})
    if not ACTIVE[get(id, 'status')] or not guard(take_back, id, failure) then redis.call('ZREM', 'kd:leases', id) end
  end
  return ids
end

local function stop_late(id, failure)
  local status = get(id, 'status')
  if status == 'running' or status == 'pausing' then
    redis.call('HSET', key(id), 'verdict', failure)
    move(id, 'cancelling', 'reason', 'deadline_exceeded')
  elseif ALLOWED[status] then
    move(id, 'failed', 'error', failure, 'reason', 'deadline_exceeded')
  end
end

-- due(error) -> ids of jobs whose deadline has passed
function transitions.due(failure)
  local ids = redis.call('ZRANGEBYSCORE', 'kd:deadlines', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    redis.call('ZREM', 'kd:deadlines', id)
    guard(stop_late, id, failure)
  end
  return ids
end

local function is_queued(id, stage)
  local name, team = 'kd:queue:' .. stage, team_of(id)
  return redis.call('ZSCORE', name, id) and redis.call('ZSCORE', name .. ':' .. team, id)
    and redis.call('SISMEMBER', 'kd:queuers:' .. stage, team) == 1
end

-- Put an open job back into the lists that it must be in. Returns whether it was missing in one.
local function repaired(id, lease)
  local status, stage, deadline = unpack(redis.call('HMGET', key(id), 'status', 'stage', 'deadline_at'))
  if not status or TERMINAL[status] then return redis.call('ZREM', 'kd:open', id) == 1 end
  if deadline and status ~= 'cancelling' then redis.call('ZADD', 'kd:deadlines', deadline, id) end
  if ACTIVE[status] then
    local devices = get(id, 'devices')
    if devices then redis.call('HSETNX', 'kd:devices:' .. team_of(id), id, devices) end
    local ends = tonumber(redis.call('ZSCORE', 'kd:leases', id) or math.huge)
    if ends <= now + LONGEST_LEASE then return false end
    redis.call('ZADD', 'kd:leases', now + lease, id)
    return true
  end
  if status == 'queued' and not is_queued(id, stage) then
    queue(id)
    return true
  end
  if status ~= 'waiting' and status ~= 'paused' then return false end
  local before = get(id, 'version')
  for _, other in ipairs(redis.call('SMEMBERS', key(id, 'waits'))) do
    if not redis.call('ZSCORE', 'kd:open', other) then settle(id, other) end
  end
  if get(id, 'status') == 'waiting' and redis.call('SCARD', key(id, 'waits')) == 0 then enter(id) end
  return get(id, 'version') ~= before
end

-- repair(start, count, lease_ms) -> {the next start, id, ...}: open jobs that had lost their lease, their place in the
-- queue, or the end of a dependency. Every transition writes all of these at once, so that only damage to Redis's data
-- or a script that failed half-way can lose them. A lease beyond the longest one was given before the clock was set back:
-- it would hold the job of a dead worker until that time comes again.
function transitions.repair(start, count, lease)
  local ids = redis.call('ZRANGE', 'kd:open', start, start + count - 1)
  local found = {#ids == tonumber(count) and start + count or 0}
  for _, id in ipairs(ids) do
    local sound, missed = guard(repaired, id, lease)
    if sound and missed then found[#found + 1] = id end
  end
  return found
end

-- hints(stage, age_ms) -> ids of queued jobs without a hint in the last age_ms, and of captures that want more workers (once
-- for each). The caller sends them now.
-- While Celery's list still contains hints, the workers have enough to do, and more would only pile up. A worker that takes
-- a hint runs every job that waits and leaves their hints behind, so all but a few are dropped.
function transitions.hints(stage, age)
  local ids = {}
  redis.call('LTRIM', 'kd:celery:' .. stage, 0, HINTS - 1)
  if redis.call('LLEN', 'kd:celery:' .. stage) > 0 then return ids end
  for _, id in ipairs(redis.call('ZRANGE', 'kd:queue:' .. stage, 0, 99)) do
    local sent = tonumber(get(id, 'dispatched_at') or '') or 0
    if not waits_in(id, stage) then
      redis.call('ZREM', 'kd:queue:' .. stage, id)  -- its record is damaged or gone
    elseif math.abs(now - sent) >= tonumber(age) then  -- later than now: the clock was set back
      redis.call('HSET', key(id), 'dispatched_at', now)
      count('kd_reconciler_republished_total', {})
      ids[#ids + 1] = id
    end
  end
  for _, id in ipairs(transitions.unhelped(stage, age)) do ids[#ids + 1] = id end
  return ids
end

-- measured(team, bytes of caches, of runs, of files, ...): the bytes on the disk of some teams, as measured now
function transitions.measured(...)
  local rows = {...}
  for i = 1, #rows, 4 do
    local team, caches, runs, files = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    book(team, account(team), 'bytes', caches + runs + files)
    redis.call('HSET', 'kd:team:' .. team, 'measured_at', now, 'caches', caches, 'runs', runs, 'files', files)
  end
end

-- accounts(team, ...) -> {team, devices held, device-seconds recently, and today, bytes, when they were measured or '',
-- quota of device-seconds a day or '', of bytes or '', queued jobs, why they wait or '', bytes of caches, of runs, of
-- files, ...}; without a team, of all teams
function transitions.accounts(...)
  local teams, found = {...}, {}
  if #teams == 0 then teams = redis.call('SMEMBERS', 'kd:teams') end
  for _, team in ipairs(teams) do
    local state, queued = account(team), 0
    for _, stage in ipairs(STAGES) do queued = queued + redis.call('ZCARD', 'kd:queue:' .. stage .. ':' .. team) end
    local limits = state.limits
    for _, value in ipairs({team, count_devices(team), string.format('%.17g', state.recent / 1000),
        string.format('%.17g', state.today / 1000), string.format('%.0f', state.bytes),
        redis.call('HGET', 'kd:team:' .. team, 'measured_at') or '',
        limits.device_seconds and string.format('%.17g', limits.device_seconds) or '',
        limits.bytes and string.format('%.0f', limits.bytes) or '', queued, why(team) or '',
        redis.call('HGET', 'kd:team:' .. team, 'caches') or '0', redis.call('HGET', 'kd:team:' .. team, 'runs') or '0',
        redis.call('HGET', 'kd:team:' .. team, 'files') or '0'}) do
      found[#found + 1] = value
    end
  end
  return found
end

-- webhooks(lease_ms, limit) -> {job, event id, url, failed tries, ...}: due messages. No other caller gets them during
-- the lease.
function transitions.webhooks(lease, limit)
  local found = {}
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', 'kd:webhooks', '-inf', now, 'LIMIT', 0, limit)) do
    local id, event = string.match(entry, '^(%S+) (%S+)$')
    local url = get(id, 'webhook')
    if url then
      redis.call('ZADD', 'kd:webhooks', now + lease, entry)
      for _, value in ipairs({id, event, url, redis.call('HGET', 'kd:webhooks:tries', entry) or '0'}) do
        found[#found + 1] = value
      end
    else
      redis.call('ZREM', 'kd:webhooks', entry)
      redis.call('HDEL', 'kd:webhooks:tries', entry)
    end
  end
  return found
end

-- webhook(id, event, delay_ms or '' for no other try, warning or '')
function transitions.webhook(id, event, delay, warning)
  local entry = id .. ' ' .. event
  if delay ~= '' then
    if not redis.call('ZSCORE', 'kd:webhooks', entry) then return end
    redis.call('ZADD', 'kd:webhooks', now + delay, entry)
    redis.call('HINCRBY', 'kd:webhooks:tries', entry, 1)
    return
  end
  redis.call('ZREM', 'kd:webhooks', entry)
  redis.call('HDEL', 'kd:webhooks:tries', entry)
  if warning ~= '' and redis.call('EXISTS', key(id)) == 1 then
    warn(id, warning)
  end
end

-- ---------------------------------------------------------------- from the driver of a search

-- journal(id, fence, line, ...) -> go | fenced: add lines to a search's study
function transitions.journal(id, fence, ...)
  if not holds(id, fence) then return 'fenced' end
  redis.call('RPUSH', key(id, 'study'), ...)
  return 'go'
end

-- trial(id, fence, number, new_id, field, value, ...) -> the id of the trial's job, which is created once | fenced
function transitions.trial(id, fence, number, new, ...)
  if not holds(id, fence) then return 'fenced' end
  if redis.call('HSETNX', key(id, 'trials'), number, new) == 1 then
    transitions.create(new, get(id, 'owner'), '0', '', '', '', '', 'parent', id, 'team', team_of(id), ...)
    if get(id, 'status') == 'pausing' then transitions.change('pause', new) end
  end
  return redis.call('HGET', key(id, 'trials'), number)
end
