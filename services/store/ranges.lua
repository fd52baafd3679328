-- ---------------------------------------------------------------- capture by several workers

-- The shards of one precompute stage are cut into ranges. The worker that holds the job's lease is the owner: it opens the
-- table of ranges, and seals the manifest when all are done. Owner and helpers are members: each takes ranges as long as
-- its beats renew its own lease. Two members may have one range: shards appear whole, and the first one counts.
--
--   a range is   where
--   untouched    its number is not below 'next'
--   free         in :free; its member died or left
--   held         in :held, with the number of its members; in :begun, by the time of the first
--   done         its bit in :done is set; it never changes again
--
--   action       from             to
--   take         untouched free   held
--                held             held    a second member, where nothing else is left and the first is slow
--   finish       held             done
--   leave        held             free    stays held where a second member has it
--   expire       held             free    the same; the other actions do it first
--
-- kd:job:{id}:ranges          hash    terms (JSON), shards, size, count, wanted or ''; next, done, sequences, spent_ms, called_at,
--                                     seen, lease_ms
-- kd:job:{id}:ranges:members  hash    token -> JSON: worker, fence, devices, gpus, memory, stages, since (ms), owner, ranges by
--                                     number, and what it has told: done, finished, pace, tokens, rate
-- kd:job:{id}:ranges:ends     zset    tokens, by the end of the lease
-- kd:job:{id}:ranges:free, :begun, :held, :done, as above; :refused  set of workers that cannot help
--
-- Range n has the shards from shards - (n + 1) * size to shards - n * size, as far as there are any: nothing lists them, and
-- the last, with the held-out text, go first. Only free and held ranges take memory, and a bit for each range. A token is
-- given once: it is the fence of a member. A table ends with the claim of its owner; the next owner opens another, whose
-- members read what is sealed and capture what is missing.

-- A range is slow that takes this many times the mean of those that are done, and at least so long.
local SLOW, LEAST_SLOW_MS = 2, 10000
-- A gang with fewer hosts than it wants works for so long before it begins anew with more.
local GROW_MS = 60000
local SLOWEST = 20  -- of the slow ranges, so many are looked at
-- Members beat every second. A table that nobody has called for so long was out of reach.
local OUTAGE_MS = 4000

local function is_done(id, number) return redis.call('GETBIT', key(id, 'ranges:done'), number) == 1 end

local function read_member(id, token)
  local text = redis.call('HGET', key(id, 'ranges:members'), token)
  return text and cjson.decode(text)
end

local function write_member(id, token, member)
  redis.call('HSET', key(id, 'ranges:members'), token, cjson.encode(member))
end

-- The devices of a helper, beside those that the owner holds. Another claim of the job counts anew.
local function hold_more(id, member, devices)
  local now_held, fence = unpack(redis.call('HMGET', key(id), 'devices', 'fence'))
  if not now_held or fence ~= member.fence or member.owner then return end
  charge(id)
  local held = math.max(now_held + devices, 1)
  redis.call('HSET', key(id), 'devices', held)
  redis.call('HSET', 'kd:devices:' .. team_of(id), id, held)
end

local function release_range(id, number)
  if redis.call('HINCRBY', key(id, 'ranges:held'), number, -1) > 0 then return end
  redis.call('HDEL', key(id, 'ranges:held'), number)
  redis.call('ZREM', key(id, 'ranges:begun'), number)
  if not is_done(id, number) then redis.call('ZADD', key(id, 'ranges:free'), number, number) end
end

-- Whether the members of a job are hosts that work on its stage together (gangs.lua).
local function is_gang(id) return redis.call('HGET', key(id, 'ranges'), 'hosts') and true end

-- Why a gang is lost, once it has begun (gangs.lua).
local function lose(id, token, why)
  local member = read_member(id, token)
  local begun = redis.call('HGET', key(id, 'ranges'), 'key')
  if member and begun then redis.call('HSETNX', key(id, 'ranges'), 'lost', 'Worker ' .. member.worker .. ' ' .. why) end
end

local function drop_member(id, token)
  local member = read_member(id, token)
  redis.call('ZREM', key(id, 'ranges:ends'), token)
  redis.call('HDEL', key(id, 'ranges:members'), token)
  if not member then return end
  for number in pairs(member.ranges) do release_range(id, number) end
  hold_more(id, member, -member.devices)
end

-- After an outage all leases seem expired, although no member could beat: then all count for another lease.
local function drop_expired(id)
  local seen, lease = unpack(redis.call('HMGET', key(id, 'ranges'), 'seen', 'lease_ms'))
  if not seen then return end
  redis.call('HSET', key(id, 'ranges'), 'seen', now)
  if now - seen > OUTAGE_MS then
    for _, token in ipairs(redis.call('ZRANGE', key(id, 'ranges:ends'), 0, -1)) do
      redis.call('ZADD', key(id, 'ranges:ends'), now + lease, token)
    end
  end
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', key(id, 'ranges:ends'), '-inf', now)) do
    lose(id, token, 'is out of reach.')
    drop_member(id, token)
  end
end

local function add_member(id, member, lease)
  local token = string.format('%.0f', redis.call('HINCRBY', key(id), 'member', 1))
  member.since, member.ranges, member.fence = now, {}, get(id, 'fence')
  member.done, member.finished, member.pace, member.tokens, member.rate = 0, 0, 0, 0, 0
  write_member(id, token, member)
  redis.call('ZADD', key(id, 'ranges:ends'), now + lease, token)
  hold_more(id, member, member.devices)
  return token
end

-- Whether the job's stage is shared now. A job that pauses or ends hands out nothing.
local function is_shared(id) return get(id, 'status') == 'running' and redis.call('EXISTS', key(id, 'ranges')) == 1 end

local function has_untaken(id)
  if redis.call('ZCARD', key(id, 'ranges:free')) > 0 then return true end
  local following, total = unpack(redis.call('HMGET', key(id, 'ranges'), 'next', 'count'))
  return tonumber(following) < tonumber(total)
end

-- The number of members that a job wants beside those it has.
local function count_missing(id)
  if not is_shared(id) or not has_untaken(id) then return 0 end
  local wanted = tonumber(redis.call('HGET', key(id, 'ranges'), 'wanted') or '') or math.huge
  return wanted - redis.call('ZCARD', key(id, 'ranges:ends'))
end

-- ranges_open(id, fence, worker, lease_ms, terms, shards, size, wanted or '') -> {opened, token of the owner} | {fenced}
function transitions.ranges_open(id, fence, worker, lease, terms, shards, size, wanted)
  if not holds(id, fence) then return {'fenced'} end
  drop_ranges(id)
  redis.call('HSET', key(id, 'ranges'), 'terms', terms, 'shards', shards, 'size', size, 'count', math.ceil(shards / size),
    'wanted', wanted, 'next', 0, 'done', 0, 'sequences', 0, 'spent_ms', 0, 'called_at', 0,
    'seen', now, 'lease_ms', lease)
  redis.call('ZADD', 'kd:boards', get(id, 'created_us'), id)
  return {'opened', add_member(id, {worker = worker, owner = true, devices = 0, gpus = 0, memory = 0, stages = ''}, lease)}
end

-- A worker idles: let the first gang grow that wants it.
local function enlarge_gang(worker, gpus, memory)
  for _, id in ipairs(redis.call('ZRANGE', 'kd:boards', 0, -1)) do
    local wanted, began = unpack(redis.call('HMGET', key(id, 'ranges'), 'wanted', 'began'))
    if began and now - began > GROW_MS and is_shared(id) and redis.call('ZCARD', key(id, 'ranges:ends')) < tonumber(wanted)
      and fits(id, gpus, memory) and redis.call('SISMEMBER', key(id, 'ranges:refused'), worker) == 0 then
      return redis.call('HSET', key(id, 'ranges'), 'grows', 1)
    end
  end
end

-- ranges_help(worker, lease_ms, gpus, memory, stages) -> {id, token, attempt, terms, config, owner, request_id, stage},
-- or nothing where no job wants this worker. The team that holds the fewest devices goes first.
function transitions.ranges_help(worker, lease, gpus, memory, stages)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', 'kd:boards', 0, -1)) do
    drop_expired(id)
    local team = team_of(id)
    local state = account(team)
    local refused = redis.call('SISMEMBER', key(id, 'ranges:refused'), worker) == 1
    local serves = string.find(' ' .. stages .. ' ', ' ' .. get(id, 'stage') .. ' ', 1, true)
    if serves and count_missing(id) > 0 and not refused and fits(id, gpus, memory) and not exhausted(state) then
      found[#found + 1] = {id = id, held = count_devices(team), recent = state.recent, created = tonumber(get(id, 'created_us'))}
    end
  end
  table.sort(found, goes_before)
  if #found == 0 then
    enlarge_gang(worker, gpus, memory)
    return false
  end
  local id = found[1].id
  local devices = count_needed(get(id, 'gpus'))
  local token = add_member(id, {worker = worker, devices = devices, gpus = gpus, memory = memory, stages = stages}, lease)
  local rest = redis.call('HMGET', key(id), 'attempt', 'config', 'owner', 'request_id', 'stage')
  local terms = redis.call('HGET', key(id, 'ranges'), 'terms')
  return {id, token, rest[1], terms, rest[2], rest[3], rest[4] or '', rest[5]}
end

-- Whether a job is queued, or gathers hosts, that this helper could run.
local function is_wanted_elsewhere(member)
  for _, id in ipairs(redis.call('ZRANGE', 'kd:boards', 0, -1)) do
    if is_gang(id) and count_missing(id) > 0 and fits(id, member.gpus, member.memory) then return true end
  end
  for stage in string.gmatch(member.stages, '%S+') do
    for _, each in ipairs(line_up(stage)) do
      if first_fit(stage, each.team, member.gpus, member.memory) then return true end
    end
  end
end

-- A range that one other member has for too long.
local function find_slow(id, member)
  local done, spent = unpack(redis.call('HMGET', key(id, 'ranges'), 'done', 'spent_ms'))
  if tonumber(done) == 0 then return end
  local before = now - math.max(SLOW * spent / done, LEAST_SLOW_MS)
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', key(id, 'ranges:begun'), '-inf', before, 'LIMIT', 0, SLOWEST)) do
    if redis.call('HGET', key(id, 'ranges:held'), number) == '1' and not member.ranges[number] then return number end
  end
end

local function choose_range(id, member)
  local free = redis.call('ZRANGE', key(id, 'ranges:free'), 0, 0)[1]
  if free then
    redis.call('ZREM', key(id, 'ranges:free'), free)
    return free
  end
  if has_untaken(id) then return string.format('%.0f', redis.call('HINCRBY', key(id, 'ranges'), 'next', 1) - 1) end
  return find_slow(id, member)
end

-- ranges_take(id, token) -> {range, number, first shard, shard after the last} | {wait} | {done} | {stop}: the job captures
-- no more, or this member has no lease | {leave}: a queued job waits for this helper
function transitions.ranges_take(id, token)
  drop_expired(id)
  local member = read_member(id, token)
  if not member or not is_shared(id) then return {'stop'} end
  local total, done, shards, size = unpack(redis.call('HMGET', key(id, 'ranges'), 'count', 'done', 'shards', 'size'))
  if done == total then return {'done'} end
  if not member.owner and is_wanted_elsewhere(member) then return {'leave'} end
  local number = choose_range(id, member)
  if not number then return {'wait'} end
  redis.call('HINCRBY', key(id, 'ranges:held'), number, 1)
  if not redis.call('ZSCORE', key(id, 'ranges:begun'), number) then redis.call('ZADD', key(id, 'ranges:begun'), now, number) end
  member.ranges[number] = now
  write_member(id, token, member)
  local stop = shards - number * size
  return {'range', number, string.format('%.0f', math.max(stop - size, 0)), string.format('%.0f', stop)}
end

-- ranges_beat(id, token, lease_ms, done, pace, tokens, rate, warning, ...) -> {go | stop | fenced, number of a range of this
-- member that another has finished, ...}
function transitions.ranges_beat(id, token, lease, done, pace, tokens, rate, ...)
  drop_expired(id)
  local member = read_member(id, token)
  if not member then return {'fenced'} end
  redis.call('ZADD', key(id, 'ranges:ends'), now + lease, token)
  member.done, member.pace, member.tokens, member.rate = tonumber(done), tonumber(pace), tonumber(tokens), tonumber(rate)
  write_member(id, token, member)
  for _, text in ipairs({...}) do warn(id, text) end
  local reply = {is_shared(id) and 'go' or 'stop'}
  for number in pairs(member.ranges) do
    if is_done(id, number) then reply[#reply + 1] = number end
  end
  return reply
end

-- ranges_finish(id, token, number, sequences) -> go | done | fenced: all shards of the range are sealed; done: by another
-- member before. A job that pauses takes it too.
function transitions.ranges_finish(id, token, number, sequences)
  drop_expired(id)
  local member = read_member(id, token)
  if not member or not member.ranges[number] then return 'fenced' end
  local before, since = is_done(id, number), member.ranges[number]
  redis.call('SETBIT', key(id, 'ranges:done'), number, 1)
  member.ranges[number] = nil
  member.finished = member.finished + sequences
  write_member(id, token, member)
  release_range(id, number)
  if before then return 'done' end
  redis.call('HINCRBY', key(id, 'ranges'), 'done', 1)
  redis.call('HINCRBY', key(id, 'ranges'), 'sequences', sequences)
  redis.call('HINCRBY', key(id, 'ranges'), 'spent_ms', now - since)
  return 'go'
end

-- ranges_leave(id, token, warning or '') -> go | fenced. A member that leaves with a warning cannot help this job again.
function transitions.ranges_leave(id, token, warning)
  local member = read_member(id, token)
  if not member then return 'fenced' end
  if warning ~= '' then
    lose(id, token, 'left: ' .. warning)
    redis.call('SADD', key(id, 'ranges:refused'), member.worker)
    warn(id, warning)
  end
  drop_member(id, token)
  return 'go'
end

-- ranges_view(id) -> {} | {count, done, sequences, untaken, then worker, ranges held, done, finished, pace, tokens, rate, ms
-- since it came, of each member}
function transitions.ranges_view(id)
  if redis.call('EXISTS', key(id, 'ranges')) == 0 or is_gang(id) then return {} end
  local total, done, sequences, following = unpack(
    redis.call('HMGET', key(id, 'ranges'), 'count', 'done', 'sequences', 'next'))
  local untaken = total - following + redis.call('ZCARD', key(id, 'ranges:free'))
  local found = {total, done, sequences, string.format('%.0f', untaken)}
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', key(id, 'ranges:ends'), now, '+inf')) do
    local member, held = read_member(id, token), 0
    for number in pairs(member.ranges) do held = held + (is_done(id, number) and 0 or 1) end
    for _, value in ipairs({member.worker, held, member.done, member.finished, member.pace, member.tokens, member.rate,
        now - member.since}) do
      found[#found + 1] = tostring(value)
    end
  end
  return found
end

-- unhelped(stage, age_ms) -> ids of jobs that want more workers for a stage and got no hint in the last age_ms, each as often
-- as it wants one
function transitions.unhelped(stage, age)
  local ids = {}
  for _, id in ipairs(redis.call('ZRANGE', 'kd:boards', 0, -1)) do
    drop_expired(id)
    local missing = count_missing(id)
    if missing > 0 and get(id, 'stage') == stage and now - redis.call('HGET', key(id, 'ranges'), 'called_at') >= tonumber(age) then
      redis.call('HSET', key(id, 'ranges'), 'called_at', now)
      for _ = 1, math.min(missing, HINTS) do ids[#ids + 1] = id end
    end
  end
  return ids
end
